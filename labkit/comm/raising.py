"""A program's rank that ends with an error ends all ranks: MPI would let it wait for them at its exit, for ever.

Not in a notebook, where an error ends a cell and the process goes on.
"""

from __future__ import annotations

import atexit
import sys
from typing import Any

from labkit.comm.mpi import MPI

__all__ = ["end_all_with_an_error"]

_before: list[Any] = []
"""What showed errors until then."""
_raised: list[type[BaseException]] = []


def end_all_with_an_error() -> None:
    """From now on an error that nothing catches ends every rank, with status 1. A second call does nothing.

    It is told first, and the program's own handlers at exit that were made later than this run.
    """
    shell = sys.modules.get("IPython")
    if _before or (shell is not None and shell.get_ipython() is not None):
        return
    _before.append(sys.excepthook)
    sys.excepthook = _note
    atexit.register(_end)  # runs before MPI's own end, which waits


def _note(kind: type[BaseException], *details: Any) -> None:
    _raised.append(kind)
    _before[0](kind, *details)


def _end() -> None:
    if _raised and MPI.Is_initialized() and not MPI.Is_finalized() and MPI.COMM_WORLD.Get_size() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
