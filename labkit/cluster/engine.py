"""The program that each rank runs: an ipyparallel engine that starts quickly.

ipyparallel gives every engine a watcher process (its "nanny"), which passes on signals and reports the engine's death,
and starts it as a new interpreter that imports everything again: as much work as the engine itself.  Here the watcher
is forked from the engine right after its imports, before MPI and any thread is up.

With ``--rejoin`` it takes the place of a rank that is gone (see `labkit.comm.recovery`).
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import sys
from typing import IO, Any

import mpi4py
from ipyparallel.engine.app import IPEngine
from ipyparallel.engine.nanny import KernelNanny
from traitlets.config import Config

__all__ = ["REJOIN", "Engine", "main"]

REJOIN = "--rejoin"


class ForkedWatcher:
    """A watcher process that waits, forked, until it is told whom to watch."""

    def __init__(self) -> None:
        orders_out, orders_in = os.pipe()
        answer_out, answer_in = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(orders_in)
            os.close(answer_out)
            self._watch(orders_out, answer_in)
        os.close(orders_out)
        os.close(answer_in)
        self.orders: IO[bytes] = os.fdopen(orders_in, "wb")
        # The watcher takes the closing of this pipe as its engine's end: it stays open as long as the engine lives.
        self.answer: IO[str] = os.fdopen(answer_out, "r")

    @staticmethod
    def _watch(orders: int, answer: int) -> None:
        """The watcher's whole life."""
        os.setsid()  # signals to the engine's group are not for the watcher
        try:
            with os.fdopen(orders, "rb") as pipe:
                told = pipe.read()
            if told:  # nothing: the engine ended before it had registered
                KernelNanny.main(**pickle.loads(told), pipe=os.fdopen(answer, "w", buffering=1))
        finally:
            os._exit(0)

    def start(self, **settings: Any) -> str:
        """Tell the watcher whom to watch; gives the address through which the engine takes control messages."""
        self.orders.write(pickle.dumps(settings | {"pid": os.getpid()}))
        self.orders.close()
        url = self.answer.readline().strip()
        if not url:
            raise RuntimeError(
                "The watcher process of this rank ended at its start; the profile's log folder tells why."
            )
        return url


class Engine(IPEngine):
    """An ipyparallel engine whose watcher was forked beforehand."""

    watcher: ForkedWatcher

    def start_nanny(self, control_url: str) -> tuple[str, ForkedWatcher]:
        """Put the waiting watcher to work (ipyparallel calls this when the engine registers)."""
        config = Config()
        config.Session = self.config.Session
        url = self.watcher.start(
            engine_id=self.id,
            identity=self.bident,
            control_url=control_url,
            curve_serverkey=self.curve_serverkey,
            curve_secretkey=self.curve_secretkey,
            curve_publickey=self.curve_publickey,
            registration_url=self.registration_url,
            config=config,
        )
        return url, self.watcher


def leave_debugger_out() -> None:
    """Let ipykernel find no debugger.

    An engine has no channel for one, but ipykernel would load debugpy all the same: a third of an engine's start.
    A cell can still import it.
    """
    if "debugpy" not in sys.modules:
        sys.modules["debugpy"] = None  # type: ignore[assignment]  # what Python takes for "not installed"
        importlib.import_module("ipykernel.debugger")
        del sys.modules["debugpy"]


def die_visibly() -> None:
    """Let `os._exit` with any status but 0 end a rank as a signal would.

    Open MPI's runtime tells the other ranks of a process that a signal ended, or that ended well without having left
    MPI, but not of one that ended with another status: they would wait for it for ever.
    """
    exit_now, rank = os._exit, os.getpid()

    def leave(status: int) -> None:
        if status and os.getpid() == rank:  # a forked process is nobody's rank
            os.kill(rank, signal.SIGKILL)
        exit_now(status)

    os._exit = leave  # type: ignore[assignment]


def main() -> None:
    """Run one engine."""
    leave_debugger_out()
    Engine.watcher = ForkedWatcher()
    die_visibly()
    # mpi4py's quick way to reduce Python objects duplicates the communicator at the first use, in a blocking call that
    # keeps the interpreter to itself: a rank that waits there for others could neither tell so nor be interrupted.
    mpi4py.rc.fast_reduce = False
    if REJOIN in sys.argv:
        sys.argv.remove(REJOIN)
        from labkit.comm.recovery import rejoin

        rejoin()
    Engine.launch_instance()


if __name__ == "__main__":
    main()
