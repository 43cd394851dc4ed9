"""Ranks that read their own files, or ask a master for them, see each sample once and step together."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from labkit import comm, data
from tests.unit.sample_files import CLASSES, LARGE, write_files

SIZES = (11, 30, 7, 5, 19)
MASTER = 0


@pytest.fixture
def paths() -> Iterator[list[Path]]:
    """The same files for all ranks; rank 0 writes them."""
    with tempfile.TemporaryDirectory() as mine:
        folder = Path(comm.broadcast_object(mine, src=0))
        written = write_files(folder, "npz", SIZES, LARGE) if comm.rank == 0 else None
        yield comm.broadcast_object(written, src=0)
        comm.barrier()


@pytest.mark.parametrize("damaged", [False, True])
def test_ranks_step_together_through_files_of_their_own(paths: list[Path], damaged: bool) -> None:
    if damaged and comm.rank == 0:
        content = bytearray(paths[1].read_bytes())
        content[len(content) // 3] ^= 0xFF
        paths[1].write_bytes(content)
    comm.barrier()
    files = data.files(paths, classes=CLASSES, skip_bad=True)
    assert comm.all_gather_object(files.summary) == [files.summary] * comm.size
    feed = files.feed(comm.rank, comm.size, 4)
    for epoch in (0, 1):
        right, seen = [], torch.zeros(CLASSES, dtype=torch.float64)
        for batch in feed.epoch(epoch):
            n = torch.tensor([float(len(batch.labels))])
            comm.all_reduce(n)  # a rank that made fewer steps would leave the others waiting here
            right.append(int(n) == batch.total)
            seen += torch.bincount(batch.labels, minlength=CLASSES)
        comm.all_reduce(seen)
        assert len(right) == feed.steps and all(right) != damaged
        assert seen.sum() == sum(SIZES) - (SIZES[1] if damaged else 0)
    assert comm.all_gather_object(bool(feed.damaged)).count(True) == damaged


def test_workers_ask_a_master_for_files(paths: list[Path]) -> None:
    files = data.files(paths, queue=True)
    queue = files.work_queue()
    workers = list(range(1, comm.size)) or [MASTER]
    if comm.rank == MASTER and comm.size > 1:
        working = set(workers)
        while working:
            worker, epoch = comm.recv_object(tag=1)
            if epoch is None:
                working.remove(worker)
            else:
                comm.send_object(queue.next(epoch), dst=worker, tag=2)
    read: list[int] = []
    if comm.rank in workers:

        def ask(epoch: int) -> int | None:
            if comm.rank == MASTER:
                return queue.next(epoch)
            comm.send_object((comm.rank, epoch), dst=MASTER, tag=1)
            piece: int | None = comm.recv_object(src=MASTER, tag=2)
            return piece

        feed = files.queue_feed(ask, batch_size=4)
        read = [sum(len(batch.labels) for batch in feed.epoch(epoch)) for epoch in (0, 1)]
        if comm.rank != MASTER:
            comm.send_object((comm.rank, None), dst=MASTER, tag=1)
    everybody = [samples for samples in comm.all_gather_object(read) if samples]
    assert [sum(epoch) for epoch in zip(*everybody, strict=True)] == [sum(SIZES)] * 2
