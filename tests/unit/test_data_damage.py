"""Damaged files, of every format and kind: named, and left out only when asked."""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from labkit import data
from labkit.data import DataError, Files

from .sample_files import (
    CLASSES,
    LARGE,
    SIZES,
    N,
    epoch_of,
    idx,
    raw,
    samples,
    write_files,
    write_npz,
    write_torch,
)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


def flip(path: Path, at: float) -> None:
    """Change a byte, so that the length stays."""
    content = bytearray(path.read_bytes())
    content[int(len(content) * at)] ^= 0xFF
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def rewrite(write: Callable[..., None], n: int = 6, **changed: Any) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        images, labels = samples(n)
        write(path, changed.get("images", images), changed.get("labels", labels))

    return damage


def named(**arrays: np.ndarray) -> Callable[[Path], None]:
    return lambda path: np.savez(path, **arrays)


SMALL, ANSWERS = samples(6)
DAMAGES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "idx cut short": ("idx", cut, r"is truncated: expected 268 bytes \(7 × 6 × 6\), found 178"),
    "idx empty": ("idx", empty, r"idx3-ubyte is empty: 0 bytes"),
    "idx no images": ("idx", lambda p: p.write_bytes(idx(SMALL[:0])), "is empty: its images are 0×6×6"),
    "idx without labels": ("idx", lambda p: next(p.parent.glob("*labels*")).unlink(), "has no labels: expected .*idx1"),
    "idx other": ("idx", lambda p: p.write_bytes(b"<html>" * 99), "to begin with 0x00000803, found 0x3c68746d"),
    "idx labels short": (
        "idx",
        lambda p: next(p.parent.glob("*labels*")).write_bytes(idx(np.zeros(3, np.uint8))),
        "has 7 images and 3 labels; expected one each",
    ),
    "idx.gz cut short": ("idx packed", cut, "is truncated: expected 252 bytes of data when unpacked"),
    "npz cut short": ("npz", cut, r"is damaged, or no npz file \(\d+ bytes\): File is not a zip file"),
    "npz empty": ("npz", empty, "part0.npz is empty: 0 bytes"),
    "npz without labels": (
        "npz",
        named(images=SMALL),
        "has no array 'labels': expected images and labels, found images",
    ),
    "npz of objects": (
        "npz",
        named(images=np.array([{}]), labels=ANSWERS),
        "Python objects; expected numbers",
    ),
    "npz of text": ("npz", named(images=np.array(["a"]), labels=ANSWERS), "is damaged, or no npz file.*can't convert"),
    "npz in the middle": ("npz", lambda p: flip(p, 0.3), "is damaged, or no npz file .*Bad CRC-32"),
    "npz packed, in the middle": ("npz packed", lambda p: flip(p, 0.4), "is damaged, or no npz file"),
    "hdf5 cut short": ("hdf5", cut, r"is damaged, or no HDF5 file .*truncated file: eof = \d+"),
    "hdf5 empty": ("hdf5", empty, "part0.h5 is empty"),
    "hdf5 other": ("hdf5", lambda p: p.write_bytes(b"x" * 900), "is damaged, or no HDF5 file .*signature not found"),
    "hdf5 without images": ("hdf5", lambda p: h5py.File(p, "w").close(), "has no array 'images': .* found nothing"),
    "torch cut short": ("torch", cut, "is damaged, or no torch file .*central directory"),
    "torch empty": ("torch", empty, "part0.pt is empty"),
    "torch other": ("torch", lambda p: p.write_bytes(b"x" * 900), "is damaged, or no torch file"),
    "torch a list": ("torch", lambda p: torch.save([1], p), "holds a list; expected a dictionary with images"),
    "torch a class": ("torch", lambda p: torch.save({"images": threading.Event}, p), "is damaged, or no torch file"),
    "old torch cut short": ("torch before 1.6", cut, "is damaged, or no torch file"),
    "other shape": (
        "npz",
        rewrite(write_npz, images=SMALL[:, :5]),
        r"part0.npz: each image is uint8 1×5×6; expected uint8 1×6×6, as in most .*\(part1.npz\)",
    ),
    "other dtype": (
        "npz",
        rewrite(write_npz, images=SMALL.astype(np.float32)),
        "each image is float32 6×6; expected uint8",
    ),
    "integers": ("npz", rewrite(write_npz, images=SMALL.astype(np.int32)), "images are int32; expected uint8"),
    "flat": ("npz", rewrite(write_npz, images=SMALL.reshape(6, 36)), "images are 6×36; expected N×H×W or N×C×H×W"),
    "channels last": ("npz", rewrite(write_npz, images=np.stack([SMALL] * 3, 3)), "as it seems N×H×W×C; expected N×C"),
    "label too high": ("npz", rewrite(write_npz, labels=ANSWERS + 9), "labels go up to 14; expected at most 9"),
    "label below 0": (
        "torch",
        rewrite(write_torch, labels=ANSWERS - 1),
        "smallest label is -1; expected labels from 0",
    ),
    "label fractions": ("npz", rewrite(write_npz, labels=ANSWERS / 2), "labels are float64 6; expected integers"),
    "labels too few": ("hdf5", lambda p: h5py_labels(p, 3), "has 7 images and 3 labels"),
}


def h5py_labels(path: Path, n: int) -> None:
    with h5py.File(path, "a") as file:
        del file["labels"]
        file["labels"] = np.zeros(n, dtype=np.int64)


@pytest.mark.parametrize("case", DAMAGES)
def test_damage_is_named_and_left_out_only_when_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    kind, damage, words = DAMAGES[case]
    paths = write_files(tmp_path, kind, SIZES)
    damage(paths[0])
    with pytest.raises(DataError, match=words) as raised:
        use(data.files(paths, classes=CLASSES))
    assert str(paths[0]) in str(raised.value)
    assert not caplog.records
    dataset = data.files(paths, classes=CLASSES, skip_bad=True)
    use(dataset)
    assert dataset.samples == N - SIZES[0] and f"left out: {paths[0]}" in caplog.text


def use(dataset: Files) -> None:
    for batches in epoch_of(dataset, 2):
        raw(dataset, batches)


@pytest.mark.parametrize("kind", ["idx packed", "npz", "npz packed"])
def test_damage_found_while_training_raises_on_that_rank_or_leaves_its_batches_empty(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    paths = write_files(tmp_path, kind, SIZES, LARGE)
    cut(paths[1]) if kind == "idx packed" else flip(paths[1], 0.3)
    strict, lenient = (data.files(paths, skip_bad=skip) for skip in (False, True))
    assert strict.samples == lenient.samples == N and not caplog.records  # the headers are whole
    [bad] = [rank for rank in (0, 1) if 1 in strict.feed(rank, 2, 4)._plan.files[rank]]
    raw(strict, list(strict.feed(1 - bad, 2, 4).epoch(0)))
    with pytest.raises(DataError, match=rf"{paths[1].name} is (damaged|truncated)"):
        list(strict.feed(bad, 2, 4).epoch(0))
    feeds = [lenient.feed(rank, 2, 4) for rank in (0, 1)]
    for epoch in (0, 1):
        by_rank = [list(feed.epoch(epoch)) for feed in feeds]
        assert {len(batches) for batches in by_rank} == {feeds[0].steps}
        seen = [number for batches in by_rank for number in raw(lenient, batches)]
        assert sorted(seen) == [*range(SIZES[0]), *range(SIZES[0] + SIZES[1], N)]
        # What the others know is what the headers said.
        assert [a.total for a in by_rank[0]] == [b.total for b in by_rank[1]]
        assert sum(batch.total for batch in by_rank[0]) == N
    assert list(feeds[bad].damaged) == [1]
    assert caplog.text.count(f"rank {bad} leaves out 12 samples") == 1  # told once, not every epoch


def test_a_queue_goes_on_without_a_damaged_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = write_files(tmp_path, "npz", SIZES, LARGE)
    flip(paths[1], 0.3)
    for skip in (True, False):
        dataset = data.files(paths, queue=True, skip_bad=skip)
        going = dataset.queue_feed(dataset.work_queue().next, 4).epoch(0)
        with contextlib.nullcontext() if skip else pytest.raises(DataError, match=r"part1.npz is damaged"):
            assert len(raw(dataset, list(going))) == N - SIZES[1]
    assert "left out: " in caplog.text and "part1.npz" in caplog.text


def test_a_damaged_first_file_does_not_decide_how_images_are_normalised(tmp_path: Path) -> None:
    paths = write_files(tmp_path, "npz", SIZES, LARGE)
    flip(paths[0], 0.3)
    with pytest.raises(DataError, match=r"part0.npz is damaged"):
        data.files(paths)
    dataset = data.files(paths, skip_bad=True)
    assert dataset.samples == N - SIZES[0]
    assert dataset.mean == data.files(paths[1:]).mean


def test_several_bad_files_are_all_named_and_the_test_set_is_checked_alike(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = write_files(tmp_path, "npz", [4] * 9, LARGE)
    tests = write_files(tmp_path / "test", "npz", (4, 4), LARGE)
    for path in (*paths[:6], tests[0]):
        empty(path)
    flip(tests[1], 0.3)
    with pytest.raises(DataError, match=r"7 files cannot be used:\n(  \S*part\d.npz is empty.*\n){5}  and 2 more"):
        data.files(paths, tests)
    with pytest.raises(DataError, match="none of the 2 test files can be used"):
        data.files(paths, tests, skip_bad=True)
    with pytest.raises(DataError, match="none of the 6 training files can be used"):
        data.files(paths[:6], skip_bad=True)
    assert data.files(paths, skip_bad=True).samples == 12
    wrong = tmp_path / "other.npz"
    write_npz(wrong, *samples(4, size=5))
    with pytest.raises(DataError, match=r"other.npz: each image is uint8 1×5×5; expected uint8 1×40×40"):
        data.files(paths[6:], wrong)


def test_a_file_that_changes_while_training_is_noticed(tmp_path: Path) -> None:
    paths = write_files(tmp_path, "npz", SIZES)
    dataset = data.files(paths)
    write_npz(paths[2], *samples(4))
    with pytest.raises(DataError, match=r"part2.npz has changed: expected 5 images, .* found 4"):
        use(dataset)


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [path] = write_files(tmp_path, "npz", [4])

    def forbidden(*_: object) -> None:  # root may read everything
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(zipfile, "ZipFile", forbidden)
    with pytest.raises(DataError, match=r"part0.npz cannot be read: Permission denied"):
        data.files(path)


def test_an_array_larger_than_its_file_is_never_made(tmp_path: Path) -> None:
    header = {"descr": "|u1", "fortran_order": False, "shape": (2**40, 28, 28)}
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as archive:
        with archive.open("images.npy", "w") as member:
            np.lib.format.write_array_header_1_0(member, header)
        with archive.open("labels.npy", "w") as member:
            np.lib.format.write_array_header_1_0(member, header | {"shape": (2**40,)})
    with pytest.raises(DataError, match=r"images has 128 bytes; expected 862,\S+ for 1099511627776×28×28"):
        data.files(tmp_path / "huge.npz")
    write_npz(tmp_path / "huge-images-idx3-ubyte", *samples(4))
    (tmp_path / "huge-images-idx3-ubyte").write_bytes(struct.pack(">4I", 0x803, 2**31, 2**15, 2**15))
    with pytest.raises(DataError, match="huge-images-idx3-ubyte"):
        data.files(tmp_path / "huge-images-idx3-ubyte")
