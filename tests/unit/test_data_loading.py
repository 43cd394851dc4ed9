"""Where data sets are looked for, what is said of broken files, and downloads from a server of our own."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision

from labkit import data
from labkit.data import DataError, NotAvailableError, digits, download
from labkit.data.datasets import KNOWN
from labkit.telemetry import facts

from .sample_files import idx

TRAIN, TEST = 30, 10
FOLDER = os.environ.get("LABKIT_DATA")  # before the fixture below hides it


def write_mnist(root: Path, folder: str = "MNIST", packed: bool = False) -> Path:
    """A small data set in torchvision's layout; returns the folder of its files."""
    raw = root / folder / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for part, n in (("train", TRAIN), ("t10k", TEST)):
        for name, array in (
            (f"{part}-images-idx3-ubyte", rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)),
            (f"{part}-labels-idx1-ubyte", rng.integers(0, 10, n, dtype=np.uint8)),
        ):
            if packed:
                (raw / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
            else:
                (raw / name).write_bytes(idx(array))
    return raw


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty cache, no LABKIT_DATA, no facts, and mirrors at an address where nobody listens."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("LABKIT_DATA", raising=False)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{unused.getsockname()[1]}/"
    for folder in download.MIRRORS:
        monkeypatch.setitem(download.MIRRORS, folder, [nobody])
    for name in ("MNIST", "FashionMNIST"):
        monkeypatch.setattr(getattr(torchvision.datasets, name), "mirrors", [nobody])
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "url", f"{nobody}cifar-10-python.tar.gz")
    facts.clear()
    yield
    facts.clear()


@pytest.mark.parametrize("packed", [False, True])
def test_ours_reads_what_torchvision_reads(tmp_path: Path, packed: bool) -> None:
    plain, ours = tmp_path / "plain", tmp_path / "ours"
    write_mnist(plain)
    write_mnist(ours, packed=packed)
    dataset = data.load("mnist", root=ours)
    for train, part in ((True, dataset.train), (False, dataset.test)):
        theirs = torchvision.datasets.MNIST(plain, train=train)
        assert torch.equal(part.images, theirs.data.unsqueeze(1))
        assert torch.equal(part.labels, theirs.targets)
    assert dataset.source == f"from {ours}"
    assert facts.recorded()["data set"] == [repr(dataset)]


def test_root_comes_before_labkit_data_and_that_before_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = data.cache_folder()
    assert cache == tmp_path / "cache" / "labkit"
    write_mnist(cache)
    assert data.load("mnist").source == f"from the cache {cache}"
    write_mnist(tmp_path / "variable")
    monkeypatch.setenv("LABKIT_DATA", str(tmp_path / "variable"))
    assert data.load("mnist").source == f"from {tmp_path / 'variable'}"
    write_mnist(tmp_path / "given")
    assert data.load("mnist", root=tmp_path / "given").source == f"from {tmp_path / 'given'}"


def test_a_folder_without_this_data_set_leaves_it_to_the_cache(tmp_path: Path) -> None:
    write_mnist(data.cache_folder(), "FashionMNIST")
    write_mnist(tmp_path / "given")
    dataset = data.load("fashion-mnist", root=tmp_path / "given")
    assert dataset.classes[9] == "Ankle boot" and "cache" in dataset.source


def test_the_mirrors_are_torchvisions() -> None:
    """In a process of its own, where nothing is replaced; and without a network torchvision is not imported."""
    program = f"""
import sys
from labkit import data
from labkit.data.download import MIRRORS
ours = dict(MIRRORS)
MIRRORS.update(dict.fromkeys(MIRRORS, ["{download.MIRRORS["MNIST"][0]}"]))
assert data.load("auto", size=9).name == "digits" and "torchvision" not in sys.modules
from torchvision.datasets import CIFAR10, MNIST, FashionMNIST
found = [*MNIST.mirrors], [*FashionMNIST.mirrors], [CIFAR10.url]
assert [*map(list, ours.values())] == [*found]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


def test_the_class_names_are_torchvisions() -> None:
    assert list(KNOWN["fashion-mnist"].classes) == torchvision.datasets.FashionMNIST.classes
    assert [name[0] for name in torchvision.datasets.MNIST.classes] == list(KNOWN["mnist"].classes)


def test_an_unknown_name_gets_the_list_and_the_nearest() -> None:
    with pytest.raises(DataError, match=r"no data set 'mnits'; there are mnist, .*Did you mean \"mnist\"?"):
        data.load("mnits")
    with pytest.raises(DataError, match="no data set 3; there are"):
        data.load(3)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="size must be"):
        data.load("digits", size=0)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=f"root is {tmp_path / 'no'}, which is not there"):
        data.load("mnist", root=tmp_path / "no")
    monkeypatch.setenv("LABKIT_DATA", str(tmp_path / "no"))
    with pytest.raises(DataError, match=r"LABKIT_DATA is .*no, which is not there"):
        data.load("auto")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="is no folder"):
        data.load("mnist", root=tmp_path / "file")


IMAGES = "train-images-idx3-ubyte"
WHOLE = 16 + TRAIN * 28 * 28


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, rf"{IMAGES} is truncated: expected {WHOLE:,} bytes .*found {WHOLE // 2:,}"),
        (
            lambda p: p.write_bytes(p.read_bytes() + b"x"),
            rf"is too long: expected {WHOLE:,} .*found {WHOLE + 1:,}",
        ),
        (lambda p: p.write_bytes(b"\0" * 5), "truncated: expected a header of 16 bytes, found 5"),
        (lambda p: p.write_bytes(b"<html>" * 99), "to begin with 0x00000803, found 0x3c68746d"),
        (lambda p: p.write_bytes(struct.pack(">4I", 0x803, 2**32 - 1, 2**16, 2**16)), "is truncated"),
        (lambda p: p.unlink(), "is not there .nor as .gz.: the data set in .* is not whole"),
    ],
)
def test_a_broken_idx_file_is_named_with_its_bytes(tmp_path: Path, damage: Callable[[Path], Any], words: str) -> None:
    damage(write_mnist(tmp_path) / IMAGES)
    with pytest.raises(DataError, match=words):
        data.load("mnist", root=tmp_path)
    with pytest.raises(DataError, match=words):  # broken files are no reason to take other data unasked
        data.load("auto", root=tmp_path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, rf"{IMAGES}.gz is truncated: expected {TRAIN * 28 * 28:,} bytes of data when unpacked"),
        (lambda p: os.truncate(p, 12), "truncated or corrupt gzip"),
        (lambda p: p.write_bytes(b"no gzip at all"), "truncated or corrupt gzip"),
        (lambda p: p.write_bytes(p.read_bytes()[:-8] + b"\0" * 8), "truncated or corrupt gzip"),
        (lambda p: p.write_bytes(gzip.compress(gzip.decompress(p.read_bytes()) + b"x")), "is too long"),
        (lambda p: p.write_bytes(gzip.compress(gzip.decompress(p.read_bytes())[:-3])), "is truncated"),
    ],
)
def test_a_broken_packed_file_is_named(tmp_path: Path, damage: Callable[[Path], Any], words: str) -> None:
    damage(write_mnist(tmp_path, packed=True) / f"{IMAGES}.gz")
    with pytest.raises(DataError, match=words):
        data.load("mnist", root=tmp_path)


def test_images_and_labels_must_be_as_many(tmp_path: Path) -> None:
    raw = write_mnist(tmp_path)
    (raw / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(TRAIN - 1, dtype=np.uint8)))
    with pytest.raises(DataError, match=f"{TRAIN} train images but {TRAIN - 1} labels"):
        data.load("mnist", root=tmp_path)


def test_size_draws_training_images_by_seed_and_leaves_the_test_set_whole(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    small, again, other = (data.load("mnist", tmp_path, size=12, seed=seed) for seed in (0, 0, 1))
    assert (len(small.train), len(small.test)) == (12, TEST)
    assert torch.equal(small.train.images, again.train.images)
    assert not torch.equal(small.train.images, other.train.images)
    assert "12 of 30 training images" in small.source
    with pytest.raises(DataError, match="has 30 training images, 31 were asked for"):
        data.load("mnist", tmp_path, size=31)


def test_digits_are_multiplied_without_letting_test_images_into_training() -> None:
    plain, large = data.load("digits", size=1437), data.load("digits", size=3000)
    assert plain.train.images.shape == (1437, 1, 28, 28) and plain.test.images.shape == (360, 1, 28, 28)
    assert len(large.train) == 3000 and torch.equal(large.test.images, plain.test.images)
    assert torch.equal(large.train.images[:1437], plain.train.images)
    counts = torch.bincount(large.train.labels)
    assert counts.min() > 0.8 * counts.float().mean()
    test_images = {bytes(image.numpy()) for image in large.test.images}
    assert not any(bytes(image.numpy()) in test_images for image in large.train.images[1437:])
    assert "1,563 altered copies (seed 0)" in large.source
    assert torch.equal(data.load("digits", size=3000).train.images, large.train.images)
    assert not torch.equal(data.load("digits", size=3000, seed=1).train.images, large.train.images)


def test_auto_takes_mnist_where_it_is(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    assert data.load("auto", root=tmp_path).name == "mnist"


def test_digits_are_read_without_importing_scikit_learn_where_its_file_is(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; from labkit import data; data.load('digits', size=9); sys.exit('sklearn' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    by_file = data.load("digits", size=1437)
    monkeypatch.setattr(digits, "find_spec", lambda name: None)
    by_library = data.load("digits", size=1437)
    assert torch.equal(by_file.train.images, by_library.train.images)
    assert torch.equal(by_file.test.labels, by_library.test.labels) and len(by_file.test) == 360


def test_auto_falls_back_to_digits_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    dataset = data.load("auto", size=100)
    assert dataset.name == "digits" and dataset.source.startswith("in place of MNIST: scikit-learn's 1,797")
    assert "In place of MNIST" in caplog.text and "could not be downloaded" in caplog.text


def test_what_can_be_had_nowhere_says_what_to_do_without_a_network() -> None:
    for name, folder in (("mnist", "MNIST"), ("cifar10", "cifar-10-batches-py")):
        words = f"{name} is not in .*{folder}, and it could not be downloaded .*refused.*set LABKIT_DATA"
        with pytest.raises(NotAvailableError, match=words):
            data.load(name)
        assert not (data.cache_folder() / folder).exists()


def test_a_mirror_that_accepts_and_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "REACHABLE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mirror = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        monkeypatch.setitem(download.MIRRORS, "MNIST", [mirror])
        with pytest.raises(NotAvailableError, match=r"timed out|no answer from"):
            data.load("mnist")


class Server(http.server.ThreadingHTTPServer):
    """Serves a folder and counts what is fetched."""

    def __init__(self, folder: Path, cut_at: int | None = None) -> None:
        self.fetched: list[str] = []
        self.cut_at = cut_at
        super().__init__(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class Handler(http.server.SimpleHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.fetched.append(self.path)
        if self.server.cut_at is None:
            super().do_GET()
        else:  # promises the whole file and hangs up in the middle of it
            content = Path(self.translate_path(self.path)).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: self.server.cut_at])

    def log_message(self, *_: object) -> None:
        pass


def published(monkeypatch: pytest.MonkeyPatch, folder: Path, cut_at: int | None = None) -> Server:
    server = Server(folder, cut_at)
    resources = [
        (name, hashlib.md5((folder / name).read_bytes()).hexdigest())
        for name, _ in torchvision.datasets.MNIST.resources
    ]
    monkeypatch.setitem(download.MIRRORS, "MNIST", [server.url])
    monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [server.url])
    monkeypatch.setattr(torchvision.datasets.MNIST, "resources", resources)
    return server


def test_a_download_lands_in_the_cache_and_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with published(monkeypatch, write_mnist(tmp_path / "server", packed=True)) as server:
        timeout = socket.getdefaulttimeout()
        first = data.load("mnist")
        assert first.source == f"downloaded to {data.cache_folder()}"
        assert socket.getdefaulttimeout() == timeout
        fetched = list(server.fetched)
        published_names = {name for name, _ in torchvision.datasets.MNIST.resources}
        assert {Path(path).name for path in fetched} == published_names
        assert data.load("mnist").source == f"from the cache {data.cache_folder()}"
        assert server.fetched == fetched
        server.shutdown()
    assert "%" not in capfd.readouterr().err  # no progress bars
    assert not list(data.cache_folder().glob(".*partial*"))


def test_a_download_broken_off_is_never_taken_for_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = write_mnist(tmp_path / "server", packed=True)
    stale = data.cache_folder() / ".MNIST.partial-killed"  # what a killed process leaves
    write_mnist(stale)
    with published(monkeypatch, files, cut_at=100) as server:
        for _ in range(2):
            with pytest.raises(NotAvailableError, match="could not be downloaded"):
                data.load("mnist")
        server.shutdown()
    assert not (data.cache_folder() / "MNIST").exists() and not stale.exists()
    with published(monkeypatch, files) as server:
        assert len(data.load("mnist").train) == TRAIN
        server.shutdown()


MANY = """
import sys, torchvision
torchvision.datasets.MNIST.mirrors = [sys.argv[1]]
torchvision.datasets.MNIST.resources = [tuple(pair.split("=")) for pair in sys.argv[2:]]
from labkit import data
from labkit.data.download import MIRRORS
MIRRORS["MNIST"] = [sys.argv[1]]
print(data.load("mnist").source.split()[0])
"""


@pytest.mark.timeout(120)
def test_several_ranks_at_once_download_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with published(monkeypatch, write_mnist(tmp_path / "server", packed=True)) as server:
        pairs = [f"{name}={md5}" for name, md5 in torchvision.datasets.MNIST.resources]
        data.load("mnist")
        once = sorted(server.fetched)  # torchvision asks for some files twice
        server.fetched.clear()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
        command = [sys.executable, "-c", MANY, server.url, *pairs]
        ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
        try:
            said = sorted(rank.communicate(timeout=100)[0].split()[0] for rank in ranks)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        server.shutdown()
    assert sorted(server.fetched) == once
    # Those that came later waited for the first one's, or found it there.
    assert len(said) == 3 and set(said) <= {"downloaded", "from"}


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"cache .*file/labkit cannot be used.*Set XDG_CACHE_HOME"):
        data.load("mnist")


@pytest.fixture
def cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small CIFAR-10 in torchvision's layout, with checksums to match."""
    folder = tmp_path / "given" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    cls = torchvision.datasets.CIFAR10

    def write(name: str, content: dict[str, Any]) -> str:
        (folder / name).write_bytes(pickle.dumps(content))
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    def batch(n: int) -> dict[str, Any]:
        return {
            "data": rng.integers(0, 256, (n, 3072), dtype=np.uint8),
            "labels": rng.integers(0, 10, n).tolist(),
        }

    for attribute, n in (("train_list", 6), ("test_list", 4)):
        monkeypatch.setattr(cls, attribute, [[name, write(name, batch(n))] for name, _ in getattr(cls, attribute)])
    names = {"label_names": list(KNOWN["cifar10"].classes)}
    monkeypatch.setattr(cls, "meta", cls.meta | {"md5": write(cls.meta["filename"], names)})
    return folder


def test_cifar_keeps_pixels_where_they_belong(cifar: Path) -> None:
    dataset = data.load("cifar10", root=cifar.parent)
    assert dataset.train.images.shape == (30, 3, 32, 32) and len(dataset.test) == 4
    first = pickle.loads((cifar / "data_batch_1").read_bytes())
    assert torch.equal(dataset.train.images[0], torch.from_numpy(first["data"][0]).reshape(3, 32, 32))
    assert dataset.train.labels[:6].tolist() == first["labels"]
    assert dataset.train.mean is not None and len(dataset.train.mean) == 3


def test_a_broken_cifar_file_is_named(cifar: Path) -> None:
    cut(cifar / "data_batch_3")
    with pytest.raises(DataError, match=r"data_batch_3 is truncated or corrupt: its .* bytes do not have the md5"):
        data.load("cifar10", root=cifar.parent)
    (cifar / "data_batch_3").unlink()
    with pytest.raises(DataError, match="data_batch_3 is not there"):
        data.load("cifar10", root=cifar.parent)


def test_real_mnist_is_whole_where_it_is_there() -> None:
    if not FOLDER or not (Path(FOLDER) / "MNIST").is_dir():
        pytest.skip("LABKIT_DATA has no MNIST")
    dataset = data.load("mnist", root=FOLDER)
    assert (len(dataset.train), len(dataset.test)) == (60_000, 10_000)
    assert dataset.train.mean == pytest.approx((0.1307,), abs=1e-4)  # the figures everyone uses for MNIST
    assert dataset.train.std == pytest.approx((0.3081,), abs=1e-4)
