"""Unequal ranks: by weight, by file, or by a master's queue, every sample comes once an epoch and nobody is lost."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from labkit import comm, data
from labkit.data import Dataset, from_tensors
from labkit.train import DNN, History, Pause, SettingError, downpour, replica_differences, run, single, synchronous
from tests.unit.sample_files import CLASSES, LARGE, write_files

SIZES = (11, 30, 7, 5, 19)
N = 101
EPOCHS = 2
QUIET: dict[str, Any] = {"progress": False, "device": "cpu", "batch_size": 4, "epochs": EPOCHS, "lr": 0.01}
QUEUED = [
    {"name": "downpour"},
    {"name": "downpour", "sync_every": 3},
    {"name": "downpour", "ranks_per_worker": 2},
    {"name": "downpour", "masters": 2},
    {"name": "backup_workers", "wait_for": 1.0},
    {"name": "easgd"},
]


class Seen(nn.Module):
    """Notes the first pixel of each image that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = DNN(1, 4, CLASSES)
        self.pixels: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.pixels += x[:, 0, 0, 0].tolist()
        output: Tensor = self.inner(x)
        return output

    @property
    def by_all(self) -> list[float]:
        """What all ranks noted, in order of size."""
        return sorted(itertools.chain.from_iterable(comm.all_gather_object(self.pixels)))


def numbered(n: int = N) -> Dataset:
    """Samples that are told from each other by their first pixel."""
    images = torch.zeros(n, 1, 4, 4)
    images[:, 0, 0, 0] = torch.arange(n)
    labels = torch.arange(n) % CLASSES
    return from_tensors(images, labels, images[:9], labels[:9])


def each_once(n: int = N) -> list[float]:
    return [float(number) for number in range(n) for _ in range(EPOCHS)]


def ranks_needed(way: dict[str, Any]) -> int:
    return 5 if way.get("masters") else 3


@pytest.fixture
def paths() -> Iterator[list[Path]]:
    """The same files for all ranks; rank 0 writes them."""
    with tempfile.TemporaryDirectory() as mine:
        folder = Path(comm.broadcast_object(mine, src=0))
        written = write_files(folder, "npz", SIZES, LARGE) if comm.rank == 0 else None
        yield comm.broadcast_object(written, src=0)
        comm.barrier()


def damage(path: Path) -> None:
    """Change a byte of the images: the header still looks well."""
    if comm.rank == 0:
        content = bytearray(path.read_bytes())
        content[len(content) // 3] ^= 0xFF
        path.write_bytes(content)
    comm.barrier()


@pytest.mark.parametrize("way", QUEUED, ids=lambda way: "-".join([way["name"], *list(way)[1:]]))
def test_a_master_hands_each_sample_out_once_an_epoch(way: dict[str, Any]) -> None:
    if comm.size < ranks_needed(way):
        pytest.skip("more ranks are needed")
    way, model = dict(way), Seen()
    history = run(way.pop("name"), model, numbered().queued(chunk=10), **way, **QUIET)
    assert model.by_all == each_once()
    assert [row.epoch for row in history.epochs] == [1, 2]
    assert sum(comm.all_gather_object(int(history.steps.samples.sum()))) == EPOCHS * N
    assert replica_differences(model) == [0.0] * comm.size


def test_a_quicker_worker_takes_more_of_them() -> None:
    if comm.size < 3:
        pytest.skip("a master and two workers are 3 ranks")
    calls, last = 0, comm.size - 1

    def held_up(output: Tensor, labels: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        # The last worker ends its first step when the first has made 30 of the 40.
        if comm.rank == last and calls == 1:
            comm.recv_object(1, tag=9)
        if comm.rank == 1 and calls == 30:
            comm.send_object("go on", last, tag=9)
        return nn.functional.nll_loss(output, labels)

    history = downpour(Seen(), numbered(160).queued(chunk=8), loss=held_up, validate=False, **QUIET | {"epochs": 1})
    samples = comm.all_gather_object(int(history.steps.samples.sum()))
    assert sum(samples) == 160 and samples[1] > samples[last] > 0


def test_with_one_worker_the_queue_goes_through_all_and_a_whole_set_is_one_piece() -> None:
    if comm.size < 2:
        pytest.skip("a master and a worker are 2 ranks")
    group = comm.world().split(0 if comm.rank < 2 else None)
    if group is None:
        return
    model = Seen()
    history = downpour(model, numbered().queued(), over=group, **QUIET)
    assert sorted(comm.all_gather_object(model.pixels, group=group)[1]) == each_once()
    assert history.epochs[-1].steps == -(-N // 4)
    group.free()


@pytest.mark.parametrize("name", ["downpour", "backup_workers"])
def test_files_are_handed_out_and_a_damaged_one_is_missed_by_nobody(paths: list[Path], name: str) -> None:
    if comm.size < 3:
        pytest.skip("a master and two workers are 3 ranks")
    damage(paths[1])
    model = DNN(1, LARGE, CLASSES)
    for queue in (True, False):
        history = run(name, model, data.files(paths, queue=queue, skip_bad=True), **QUIET)
        used = sum(comm.all_gather_object(int(history.steps.samples.sum())))
        assert used == EPOCHS * (sum(SIZES) - SIZES[1])
        assert [row.epoch for row in history.epochs] == [1, 2]  # each is closed, though samples are missing
    assert replica_differences(model) == [0.0] * comm.size


@pytest.mark.parametrize("name", ["synchronous", "averaging"])
def test_ranks_step_together_through_parts_by_weight(name: str) -> None:
    weights = [1.0 + rank for rank in range(comm.size)]
    together, alone = Seen(), Seen()
    settings = QUIET | {"lr": 0.001, "momentum": 0.0} | ({"average_every": 1} if name == "averaging" else {})
    ours = run(name, together, numbered().weighted(weights), **settings)
    assert together.by_all == each_once()
    settings.pop("average_every", None)
    theirs = single(alone, numbered(), **settings | {"batch_size": 4 * comm.size})
    assert ours.steps.loss == pytest.approx(theirs.steps.loss, rel=1e-4)
    taken = comm.all_gather_object(int(ours.steps.samples.sum()))
    assert taken == sorted(taken) and len(set(taken)) == comm.size


@pytest.mark.parametrize("sync", ["fused", "overlap", "ddp"])
def test_a_rank_that_has_no_sample_left_steps_with_the_others(paths: list[Path], sync: str) -> None:
    files = data.files(paths[:3])  # 11, 30 and 7 samples: whole files, so that one rank has the most steps
    torch.manual_seed(0)
    model = DNN(1, LARGE, CLASSES)
    history = synchronous(model, files, sync=sync, **QUIET)
    counts = comm.all_gather_object(history.steps.samples.tolist())
    assert comm.size == 1 or any(0 in theirs for theirs in counts)
    assert sum(map(sum, counts)) == EPOCHS * sum(SIZES[:3])
    assert replica_differences(model) == [0.0] * comm.size
    losses = comm.all_gather_object(history.steps.loss.tolist())
    assert all(theirs == losses[0] for theirs in losses)
    torch.manual_seed(0)
    plain = DNN(1, LARGE, CLASSES)
    other = synchronous(plain, files, sync="per_parameter", **QUIET)
    assert history.steps.loss == pytest.approx(other.steps.loss, rel=1e-5)


def test_torchs_data_sets_are_taken_as_they_are() -> None:
    images, labels = torch.rand(30, 1, 4, 4), torch.arange(30) % CLASSES
    comm.broadcast(images)
    pair = TensorDataset(images, labels), TensorDataset(images[:5], labels[:5])
    history = synchronous(DNN(1, 4, CLASSES), pair, **QUIET)
    assert sum(comm.all_gather_object(int(history.steps.samples.sum()))) == EPOCHS * 30


def test_what_does_not_go_together_is_refused_on_all_ranks_with_the_cure() -> None:
    with pytest.raises(SettingError, match=r"needs a training method with a master.*without queued"):
        synchronous(Seen(), numbered().queued(), **QUIET)
    several = [1.0] * (comm.size + 1)
    with pytest.raises(SettingError, match=f"{comm.size + 1} weights were given, and {comm.size} ranks compute"):
        synchronous(Seen(), numbered().weighted(several), **QUIET)
    if comm.size > 1:  # the master computes nothing
        with pytest.raises(
            SettingError, match=f"{comm.size + 1} weights were given, and {comm.size - 1} ranks compute"
        ):
            downpour(Seen(), numbered().weighted(several), **QUIET)


@pytest.mark.parametrize("queued", [False, True])
def test_a_slow_rank_computes_longer_and_is_recorded_so(queued: bool) -> None:
    if queued and comm.size < 3:
        pytest.skip("a master and two workers are 3 ranks")
    last, seconds = comm.size - 1, 0.02
    dataset = numbered(40 * comm.size)

    def trained(**settings: Any) -> History:
        settings |= QUIET | {"epochs": 1}
        if queued:
            return downpour(Seen(), dataset.queued(chunk=8), **settings)
        return synchronous(Seen(), dataset, **settings)

    history = trained(slow={last: Pause(seconds, every=1)})
    if comm.rank == last:
        assert len(history.steps) and (history.steps.compute_s >= seconds).all()
