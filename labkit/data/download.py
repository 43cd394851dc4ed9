"""Fetching a data set into the user's cache: once for all ranks, whole or not at all, never waiting long."""

from __future__ import annotations

import contextlib
import http.client
import io
import logging
import os
import queue
import shutil
import socket
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .errors import DataError, NotAvailableError

__all__ = ["cache_folder", "fetch"]

log = logging.getLogger("labkit.data")

REACHABLE_S = 5.0
"""How long a mirror may take to answer at all; a machine without a network then falls back."""
SOCKET_S = 10.0
"""How long a download may stand still."""
LOCK_S = 900.0
"""How long a rank waits for another one that downloads."""
MIRRORS: dict[str, Sequence[str]] = {
    "MNIST": ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
    "FashionMNIST": ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
    "cifar-10-batches-py": ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",),
}
"""By folder, the same addresses as torchvision's: whether one answers is asked before the seconds of its import."""


def cache_folder() -> Path:
    """Return labkit's cache: ``$XDG_CACHE_HOME/labkit``, or ``~/.cache/labkit``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "labkit"


def fetch(find_class: Callable[[], type[Any]], folder: str, cache: Path) -> None:
    """Download a torchvision data set, so that `cache` / `folder` is there and whole afterwards.

    It is downloaded beside its place and then renamed, so that a download broken off is never taken for a
    whole one. Of several processes one downloads and the others wait.

    Parameters
    ----------
    find_class
        Returns torchvision's class, which knows files and checksums. Only the process that downloads calls it, since
        importing torchvision takes seconds.
    folder
        The folder that it makes, one of `MIRRORS`.
    cache
        Where that folder goes.

    Raises
    ------
    NotAvailableError
        If no mirror answers or the download breaks off.
    DataError
        If the cache cannot be written.
    """
    asked = time.time()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        failed = cache / f".{folder}.failed"
        with FileLock(cache / f".{folder}.lock", timeout=LOCK_S):
            if (cache / folder).exists():
                return
            # A rank that waited while another one found the network dead need not find out again.
            if failed.exists() and failed.stat().st_mtime >= asked:
                raise NotAvailableError(failed.read_text())
            try:
                reason = _unreachable(MIRRORS[folder])
                if reason:
                    raise NotAvailableError(f"it could not be downloaded ({reason})")
                _download(find_class(), folder, cache)
            except NotAvailableError as error:
                failed.write_text(str(error))
                raise
            failed.unlink(missing_ok=True)
    except Timeout as error:
        raise NotAvailableError(
            f"another process has been downloading {folder} for {LOCK_S / 60:.0f} min; end it and try again"
        ) from error
    except OSError as error:
        raise DataError(
            f"the cache {cache} cannot be used: {error}. Set XDG_CACHE_HOME to a folder that can be written."
        ) from error


def _download(dataset: type[Any], folder: str, cache: Path) -> None:
    for left_over in cache.glob(f".{folder}.partial-*"):  # of a process that was killed: we hold the lock
        shutil.rmtree(left_over, ignore_errors=True)
    log.warning("downloading %s to %s", folder, cache)
    with tempfile.TemporaryDirectory(prefix=f".{folder}.partial-", dir=cache) as partial:
        try:
            with _quiet(), _socket_timeout(SOCKET_S):
                dataset(partial, download=True)
        except (RuntimeError, OSError, EOFError, http.client.HTTPException) as error:
            raise NotAvailableError(f"it could not be downloaded ({_one_line(error)})") from error
        os.replace(Path(partial) / folder, cache / folder)


def _unreachable(mirrors: Sequence[str]) -> str | None:
    """Return why none of the mirrors answers within `REACHABLE_S`, or None when one does.

    Asked in threads: looking up a name without a network can take much longer than any socket timeout, and
    cannot be broken off.
    """
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def ask(url: str) -> None:
        request = urllib.request.Request(url, method="HEAD", headers={"User-Agent": "labkit"})
        try:
            urllib.request.urlopen(request, timeout=REACHABLE_S).close()
        except urllib.error.HTTPError as error:
            error.close()  # it refuses this address, but it is there
        except (OSError, http.client.HTTPException, ValueError) as error:
            answers.put(f"{url}: {_one_line(error)}")
            return
        answers.put(None)

    for url in mirrors:
        threading.Thread(target=ask, args=(url,), daemon=True).start()
    until = time.monotonic() + REACHABLE_S
    reasons = []
    for _ in mirrors:
        try:
            reason = answers.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return f"no answer from {', '.join(mirrors)} within {REACHABLE_S:g} s"
        if reason is None:
            return None
        reasons.append(reason)
    return "; ".join(reasons)


@contextlib.contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """Limit every new socket, since torchvision passes no timeout on."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torchvision's progress bars, one a rank, out of the notebook."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        yield


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
