"""labkit: a lab for distributed PyTorch over real MPI.

In a notebook::

    import labkit

    lab = labkit.start(ranks=4)  # four MPI processes; %%px cells run on all of them
    live = labkit.live()         # per-rank loss and step time, while the training cell runs

Importing labkit is light: ipyparallel, plotly and torch are loaded when they are first needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.charts.live import Live
    from labkit.cluster.current import connect, current, facts, start, stop
    from labkit.cluster.errors import ClusterError
    from labkit.cluster.lab import Lab

__version__ = "0.1.0"
__all__ = ["ClusterError", "Lab", "connect", "current", "facts", "live", "start", "stop"]

_HOMES = {
    "ClusterError": "labkit.cluster.errors",
    "Lab": "labkit.cluster.lab",
    **dict.fromkeys(("connect", "current", "facts", "start", "stop"), "labkit.cluster.current"),
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'labkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


def live(title: str = "Training") -> Live:
    """A live chart of per-rank loss and step time for this notebook's lab, with Stop button and learning rate.

    Raises
    ------
    ClusterError
        When there is no lab yet.
    """
    from labkit.cluster.magics import this_lab

    return this_lab().live(title)
