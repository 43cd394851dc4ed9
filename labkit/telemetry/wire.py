"""The bytes of a message: one header frame, one frame of float64 rows.

Plain bytes rather than pickle: a reader that meets a broken or foreign message refuses it and
runs nothing that came with it.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .events import COLUMNS

__all__ = ["Endpoints", "Header", "MalformedMessageError", "decode", "decode_control", "encode", "encode_control"]

_MAGIC = b"LKT1"
# magic, emitter's id, rank, columns, rows in this message, message number, rows sent so far with these,
# rows dropped so far, when the run began (seconds since the epoch; 0 if no run was begun)
_HEADER = struct.Struct("<4s8siHIQQQd")


class MalformedMessageError(ValueError):
    """A message that is not one of ours, or was cut short."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a rank finds the notebook: two ZeroMQ addresses (``ipc://…`` or ``tcp://…``)."""

    metrics: str
    control: str


class Header(NamedTuple):
    """What goes before the rows of a batch."""

    emitter: bytes
    rank: int
    steps: int
    sequence: int
    sent: int
    dropped: int
    run: float


def encode(header: Header, rows: np.ndarray) -> list[bytes]:
    """Turn a batch of rows (steps by columns, float64) into the two frames of a message."""
    emitter, rank, steps, sequence, sent, dropped, run = header
    head = _HEADER.pack(_MAGIC, emitter, rank, len(COLUMNS), steps, sequence, sent, dropped, run)
    return [head, rows.tobytes()]


def decode(frames: list[bytes]) -> tuple[Header, np.ndarray]:
    """Turn frames back into a header and its rows (steps by columns, read-only).

    Raises
    ------
    MalformedMessageError
        If the frames are not a whole message of ours.
    """
    if len(frames) != 2 or len(frames[0]) != _HEADER.size:
        raise MalformedMessageError(f"expected a header of {_HEADER.size} bytes and one frame of rows")
    magic, emitter, rank, columns, steps, sequence, sent, dropped, run = _HEADER.unpack(frames[0])
    if magic != _MAGIC or columns != len(COLUMNS):
        raise MalformedMessageError("another program's message, or another version's")
    if len(frames[1]) != steps * columns * 8:
        raise MalformedMessageError(f"{len(frames[1])} bytes of rows where {steps * columns * 8} were announced")
    if not math.isfinite(run):
        raise MalformedMessageError("a run that began at no time")
    rows = np.frombuffer(frames[1], dtype=np.float64).reshape(steps, columns)
    # A loss may diverge to NaN or infinity, and the chart shows that; all else is counted or measured.
    if not np.isfinite(np.delete(rows, COLUMNS.index("loss"), axis=1)).all():
        raise MalformedMessageError("a step with a number that is not finite")
    return Header(emitter, rank, steps, sequence, sent, dropped, run), rows


def encode_control(stop: bool, lr: float | None, at: float) -> bytes:
    """Turn the notebook's wishes, made `at` seconds since the epoch, into one frame."""
    return json.dumps({"stop": stop, "lr": lr, "at": at}).encode()


def decode_control(frame: bytes) -> tuple[bool, float | None, float]:
    """Turn a control frame back into (stop, learning rate, time it was made).

    Raises
    ------
    MalformedMessageError
        If it is not one of ours.
    """
    try:
        message = json.loads(frame)
        lr = message["lr"]
        return bool(message["stop"]), None if lr is None else float(lr), float(message["at"])
    except (ValueError, TypeError, KeyError) as error:
        raise MalformedMessageError(f"not a control message: {error}") from error
