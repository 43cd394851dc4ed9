"""Which call of torch.distributed a rank is in, read off its stack.

Its back ends wait in C++, where nothing tells whose message is missing; but the call and its arguments are there.
"""

from __future__ import annotations

import os
import time
from types import FrameType

from labkit.comm.waiting import place
from labkit.telemetry.states import Wait

__all__ = ["torch_wait"]

_HOME = os.path.join("torch", "distributed", "distributed_c10d.py")
_SHOWN = ("src", "dst", "group_src", "group_dst", "tag")

_first_seen: tuple[int, float] = 0, 0.0


def torch_wait(frame: FrameType | None, rank: int) -> Wait | None:
    """The call of torch.distributed that `frame` is in; None if it is in none.

    It counts as waited for since it was first asked about. Its kind is "other": it is seen, and nothing is concluded.
    """
    global _first_seen
    call = None
    while frame is not None:
        if frame.f_code.co_filename.endswith(_HOME) and not frame.f_code.co_name.startswith("_"):
            call = frame  # the outermost one is what the user called
        frame = frame.f_back
    if call is None:
        return None
    if _first_seen[0] != id(call):
        _first_seen = id(call), time.time()
    name, values = call.f_code.co_name, call.f_locals
    told = ", ".join(f"{key}={values[key]}" for key in _SHOWN if values.get(key) is not None)
    text = f"torch.distributed.{name}({told})"
    return Wait(name, rank, communicator="torch.distributed", since=_first_seen[1], place=place(call), text=text)
