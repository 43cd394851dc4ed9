"""Methods of mpi4py's classes, replaced and put back.

A subclass that stands in for `MPI.COMM_WORLD` would leave out what programs make by other means, such as
``MPI.Intracomm(comm)``, requests or windows, and break those that ask for ``type(comm) is MPI.Intracomm``. So the
methods themselves are replaced. The classes refuse assignment; their dictionary does not, and CPython must then be
told that what it remembers of the class is out of date.
"""

from __future__ import annotations

import ctypes
import gc
from typing import Any

__all__ = ["put", "take_back"]

_modified = ctypes.pythonapi.PyType_Modified
_modified.argtypes, _modified.restype = [ctypes.py_object], None

_originals: dict[tuple[type, str], Any] = {}


def put(kind: type, name: str, value: Any) -> None:
    """Make `value` the attribute `name` of the class.

    Raises
    ------
    RuntimeError
        Where this Python gives no way to do so.
    """
    inside = _dictionary(kind)
    _originals.setdefault((kind, name), inside[name])
    inside[name] = value
    _modified(kind)
    if vars(kind)[name] is not value:
        raise RuntimeError(f"this Python does not let labkit watch {kind.__name__}.{name}; raw MPI calls go unseen")


def take_back() -> None:
    """Undo every `put`."""
    while _originals:
        (kind, name), original = _originals.popitem()
        _dictionary(kind)[name] = original
        _modified(kind)


def _dictionary(kind: type) -> dict[str, Any]:
    """The dictionary behind the read-only view that ``vars(kind)`` gives."""
    found: dict[str, Any] = next(each for each in gc.get_referents(vars(kind)) if type(each) is dict)
    return found
