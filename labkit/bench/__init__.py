"""What the performance tables in the README come from: ``labkit bench NAME [--json]``.

Each benchmark measures ours and its peers in turn in one run and returns one `Outcome`.  Goals are ratios, or figures
that do not depend on the machine.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from statistics import median
from typing import Any

import psutil

__all__ = ["NAMES", "RANKED", "Goal", "Outcome", "machine", "run", "spread"]

# name → what it measures; each is a module of this package with a function `run(quick: bool) -> Outcome`.
NAMES = {
    "allreduce": "all-reduce in shared memory against one local copy, mpi4py and gloo, 8 B to 64 MB",
    "balance": "an epoch with one worker 3 times slower: equal shards against a queue at the master",
    "epoch": "images a second of training on 1 and 2 ranks, with and without communication",
    "methods": "every training method on 4 ranks: accuracy, seconds, images a second, share of communication",
    "start": "time from labkit.start(4) to the first %%px answer, against a plain ipyparallel MPI cluster",
    "step": "what each way to reduce gradients adds to a training step, for three models, beside DDP on gloo",
    "telemetry": "cost of logging a step at the rank, events sent and received, memory of the bounded store",
    "update": "applying an update by loop, foreach, fused and on flat parameters; workers that a master can serve",
    "validate": "time saved by testing in a thread or on all ranks, against rank 0 alone while the others wait",
    "wait": "labkit's send, recv and all_reduce against raw blocking mpi4py, CPU of a rank that waits",
}

RANKED = ("allreduce", "balance", "epoch", "methods", "step", "validate")
"""Those that can be asked to measure on worlds of other sizes."""


@dataclass(frozen=True)
class Goal:
    """A figure that must hold.

    Attributes
    ----------
    name
        What was measured.
    value
        The figure of this run.
    limit
        Its bound.
    at_most
        Whether the bound is an upper one.
    """

    name: str
    value: float
    limit: float
    at_most: bool = True

    @property
    def met(self) -> bool:
        """Whether the figure keeps to its bound."""
        return self.value <= self.limit if self.at_most else self.value >= self.limit


@dataclass
class Outcome:
    """What one benchmark measured: `rows` of a table, and the goals."""

    bench: str
    rows: list[dict[str, Any]]
    goals: list[Goal] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """One JSON object: bench, machine, rows, goals."""
        goals = [asdict(goal) | {"met": goal.met} for goal in self.goals]
        return {"bench": self.bench, "machine": machine(), "rows": self.rows, "goals": goals}


def machine() -> dict[str, Any]:
    """The machine that was measured on, as far as it explains the figures."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    except OSError:
        model = platform.machine()
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest of some measurements."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def run(name: str, *, quick: bool = False, ranks: Sequence[int] | None = None) -> Outcome:
    """Run benchmark `name`.

    Parameters
    ----------
    name
        One of `NAMES`.
    quick
        Fewer repetitions: shows that it runs, not what it costs.
    ranks
        World sizes to measure on, for a benchmark of `RANKED`; default its own.

    Raises
    ------
    KeyError
        When there is no such benchmark, or it takes no number of ranks.
    """
    if name not in NAMES:
        raise KeyError(f"no benchmark {name!r}; there is: {', '.join(NAMES)}")
    if ranks and name not in RANKED:
        raise KeyError(f"benchmark {name!r} takes no number of ranks; these do: {', '.join(RANKED)}")
    options = {"ranks": tuple(ranks)} if ranks else {}
    outcome: Outcome = import_module(f"labkit.bench.{name}").run(quick=quick, **options)
    return outcome
