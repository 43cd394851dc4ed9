"""The wire between the ranks and the notebook: steps and states one way, wishes the other.

Both sides import it; it imports nothing else of labkit, and no torch. A rank calls `connect` (the lab
does that) and training asks `emitter()` and `control()`; the notebook holds a `Collector`, whose `store`
the charts read.
"""

from . import facts
from .collector import Collector, Counts
from .connection import connect, control, disconnect, emitter
from .control import ControlReader, ControlState
from .emitter import Emitter
from .events import COLUMNS, Step
from .states import RankState, Wait
from .store import Store
from .wire import Endpoints, MalformedMessageError

__all__ = [
    "COLUMNS",
    "Collector",
    "ControlReader",
    "ControlState",
    "Counts",
    "Emitter",
    "Endpoints",
    "MalformedMessageError",
    "RankState",
    "Step",
    "Store",
    "Wait",
    "connect",
    "control",
    "disconnect",
    "emitter",
    "facts",
]
