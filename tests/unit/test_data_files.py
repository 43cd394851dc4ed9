"""Training sets in files: every format, shared by whole files, and which files are meant."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from labkit import data
from labkit.data import DataError
from labkit.telemetry import facts

from .sample_files import (
    FORMATS,
    SIZES,
    N,
    epoch_of,
    idx,
    numbers,
    raw,
    samples,
    write_files,
    write_npz,
    write_torch,
)


@pytest.fixture(autouse=True)
def no_facts() -> Iterator[None]:
    facts.clear()
    yield
    facts.clear()


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_gives_each_sample_once(tmp_path: Path, kind: str) -> None:
    write_files(tmp_path, kind, SIZES)
    dataset = data.files(str(tmp_path / "*"))
    assert (dataset.samples, dataset.channels, dataset.image_size) == (N, 1, 6)
    assert dataset.classes == tuple("0123456789") and len(dataset.test) == 0
    for epoch in (0, 1):
        by_rank = epoch_of(dataset, 3, epoch=epoch)
        assert sorted(number for batches in by_rank for number in raw(dataset, batches)) == list(range(N))
        assert {len(batches) for batches in by_rank} == {dataset.feed(0, 3, 4).steps}
    # Each rank keeps its files, and begins an epoch in an order of its own.
    first, second = (epoch_of(dataset, 3, epoch=epoch)[0] for epoch in (0, 1))
    assert raw(dataset, first) != raw(dataset, second)
    assert set(raw(dataset, first)) == set(raw(dataset, second))


def test_all_ranks_see_the_same_set(tmp_path: Path) -> None:
    paths = write_files(tmp_path / "train", "npz", SIZES)
    tests = write_files(tmp_path / "test", "hdf5", (6, 3))
    dataset = data.files(paths, tests, name="own", weights=(2, 1))
    assert dataset.summary.startswith(
        f"own: {N} training images in 4 files and 9 test images, 1×6×6, 10 classes, weights 2:1, checksum "
    )
    assert dataset.source == f"from {tmp_path / 'train'}" and facts.recorded()["data set"] == [repr(dataset)]
    assert data.files(paths, tests, name="own", weights=(2, 1)).summary == dataset.summary
    assert data.files(paths[:3], tests, name="own").summary != dataset.summary
    assert sorted(numbers(dataset.test.images)) == list(range(9))
    # Normalised as the training set is, by its first file.
    images, _ = samples(SIZES[0])
    assert dataset.mean == pytest.approx((images.mean() / 255,)) and dataset.std == pytest.approx((images.std() / 255,))
    assert dataset.test.mean == dataset.mean
    assert data.files(paths, mean=[0.5], std=[0.25]).feed(0, 1, 4)._empty.std == (0.25,)


def test_weights_move_files_to_the_quicker_rank(tmp_path: Path) -> None:
    dataset = data.files(write_files(tmp_path, "npz", [5] * 9), weights=(2, 1))
    quick, slow = epoch_of(dataset, 2)
    assert (len(raw(dataset, quick)), len(raw(dataset, slow))) == (30, 15)
    assert len(quick) == len(slow) == 6  # 5 of 8 samples a step for the one, 3 for the other
    quick, slow = (list(dataset.feed(rank, 2, 4, weights=(1, 1)).epoch(0)) for rank in (0, 1))
    assert (len(raw(dataset, quick)), len(raw(dataset, slow))) == (25, 20)


def test_a_queue_hands_each_file_to_whoever_asks(tmp_path: Path) -> None:
    dataset = data.files(write_files(tmp_path, "torch", SIZES), queue=True)
    assert dataset.by_queue and "handed out one by one" in dataset.summary
    queue = dataset.work_queue(seed=1)
    feeds = [dataset.queue_feed(queue.next, 4) for _ in range(2)]
    quick, slow = (feed.epoch(0) for feed in feeds)
    late = [next(slow)]
    made = list(quick)
    assert len(made) > len(late)
    assert sorted(raw(dataset, [*made, *late, *slow])) == list(range(N))
    with pytest.raises(DataError, match="needs a training method with a master"):
        dataset.feed(0, 2, 4)
    with pytest.raises(DataError, match="weights are for shares made beforehand"):
        data.files(tmp_path / "part0.pt", weights=(1, 1), queue=True)
    with pytest.raises(DataError, match="handed out by no queue"):
        data.files(tmp_path / "part0.pt").work_queue()


def test_floating_point_samples_of_any_byte_order_are_taken_as_they_are(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(10, 3))
    write_npz(tmp_path / "little.npz", values, np.arange(10) % 3)
    write_npz(tmp_path / "big.npz", np.asfortranarray(values.astype(">f8")), np.arange(10, dtype=">i2") % 3)
    little, big = (data.files(tmp_path / f"{name}.npz").feed(0, 1, 10).epoch(0) for name in ("little", "big"))
    one, other = next(little), next(big)
    assert one.images.dtype == torch.float64 and torch.equal(one.images, other.images)
    assert sorted(map(tuple, one.images.tolist())) == sorted(map(tuple, values.tolist()))


def test_colour_keeps_its_channels(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (8, 3, 5, 5), dtype=np.uint8)
    write_torch(tmp_path / "c.pt", images, np.arange(8) % 2)
    dataset = data.files(tmp_path / "c.pt")
    assert dataset.channels == 3 and dataset.mean == pytest.approx(images.mean((0, 2, 3)) / 255)


def test_a_rank_without_a_file_takes_part_in_every_step_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = data.files(write_files(tmp_path, "npz", (5, 7)))
    batches = list(dataset.feed(2, 3, 4, dtype=torch.float64).epoch(0))
    assert [(len(b.labels), b.images.shape, b.total) for b in batches] == [(0, (0, 1, 6, 6), 8), (0, (0, 1, 6, 6), 4)]
    assert batches[0].images.dtype == torch.float64 and "rank 2 has no file of the 2" in caplog.text


def test_a_pattern_takes_no_file_twice(tmp_path: Path) -> None:
    write_files(tmp_path, "idx", (4, 5))
    write_files(tmp_path, "idx packed", (4, 5))  # a download often leaves both
    assert data.files(f"{tmp_path}/*").samples == 9
    assert [h.path.name for h in data.files(f"{tmp_path}/*.gz").headers] == [
        "part0-images-idx3-ubyte.gz",
        "part1-images-idx3-ubyte.gz",
    ]


def test_lists_of_files_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    paths = write_files(tmp_path, "npz", (4, 5))
    (tmp_path / "notes.txt").write_text("x")
    for words, train, test in (
        ("train: no file fits '.*nothing", tmp_path / "nothing*", None),
        ("test: no file fits '.*nothing", paths, tmp_path / "nothing*"),
        ("train: no files were given", [], None),
        (r"part0.npz is given twice", [paths[0], tmp_path / "part*"], None),
        (r"part1.npz is among the training and the test files", paths, paths[1:]),
        (r"gone.npz cannot be read: No such file", tmp_path / "gone.npz", None),
        (r"notes.txt is of no known format; expected a name that ends in .npz, .h5", tmp_path / "notes.txt", None),
        (r"is of no known format", tmp_path, None),
    ):
        with pytest.raises(DataError, match=words):
            data.files(train, test)
    for words, named in (
        ("give both mean and std", {"mean": [0.5]}),
        ("must be 1 number each", {"mean": [0.5, 0.5], "std": [1, 1]}),
        ("std above 0", {"mean": [0.5], "std": [0]}),
        ("classes must be names", {"classes": 0}),
        ("labels go up to 8; expected at most 2, since there are 3 classes", {"classes": ["a", "b", "c"]}),
    ):
        with pytest.raises(DataError, match=words):
            data.files(paths[1], **named)
    assert data.files(paths[1], classes=20).classes[19] == "19"


def test_fashion_mnist_goes_from_torchvisions_layout_to_three_parts(tmp_path: Path) -> None:
    folder = tmp_path / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    for part, n, start in (("train", 60, 0), ("t10k", 10, 60)):
        images, labels = samples(n, start, size=28)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(images))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels.astype(np.uint8)))
    whole = data.load("fashion-mnist", root=tmp_path)
    choosing, test = whole.split(validation=10)
    assert (len(choosing.train), len(choosing.test), len(test)) == (50, 10, 10)
    assert choosing.classes[:2] == ("T-shirt/top", "Trouser") and "50 training and 10 validation" in choosing.summary
    assert sorted(numbers(torch.cat((choosing.train.images, choosing.test.images)))) == list(range(60))
    assert numbers(test.images) == list(range(60, 70))
    # The same files as a list of files.
    files = data.files(folder / "train-images-idx3-ubyte", folder / "t10k-images-idx3-ubyte", classes=whole.classes)
    assert files.mean == whole.train.mean and torch.equal(files.test.images, whole.test.images)
    assert sorted(raw(files, list(files.feed(0, 1, 7).epoch(0)))) == list(range(60))
