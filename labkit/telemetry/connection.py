"""The rank's one connection to the notebook, and how training finds it."""

from __future__ import annotations

import atexit

from .control import ControlReader
from .emitter import Emitter
from .wire import Endpoints

__all__ = ["connect", "control", "disconnect", "emitter"]

_emitter: Emitter | None = None
_control: ControlReader | None = None


def connect(endpoints: Endpoints, rank: int) -> None:
    """Send this rank's steps to a collector, and on rank 0 listen to its controls.

    A second call replaces the first connection.

    Raises
    ------
    ValueError
        If an address is not a ZeroMQ address.
    """
    global _emitter, _control
    disconnect()
    reader = ControlReader(endpoints.control if rank == 0 else None)
    try:
        _emitter = Emitter(endpoints.metrics, rank, on_begin=reader.begin_run)
    except ValueError:
        reader.close()
        raise
    _control = reader


def disconnect() -> None:
    """Send what is left (within about a second) and close; harmless when not connected."""
    global _emitter, _control
    if _emitter is not None:
        _emitter.close()
    if _control is not None:
        _control.close()
    _emitter = _control = None


def emitter() -> Emitter | None:
    """Return this rank's emitter, or None when nobody watches."""
    return _emitter


def control() -> ControlReader | None:
    """Return this rank's control reader, or None when nobody watches.

    All ranks of a connected world have one, so that all agree to broadcast what rank 0's says.
    """
    return _control


# A rank that ends must not keep its last steps.
atexit.register(disconnect)
