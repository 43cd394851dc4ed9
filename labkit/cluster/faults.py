"""Faults made for real, to see that every cell comes back: for ``labkit doctor --faults`` and the tests.

Each is tried with messages of three sizes, in labkit's calls and in raw mpi4py, between pairs of ranks and in
collectives. Afterwards every rank must be at its prompt with its variables, and the next sums must be right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from statistics import median

from labkit.cluster.cells import CellDeadlineError, CellError, CellInterrupted, DeadlockError
from labkit.cluster.errors import ClusterError
from labkit.cluster.lab import Lab

__all__ = ["BYTES", "FAULTS", "SHAPES", "WAYS", "Case", "Outcome", "cases", "prepare", "table", "try_out"]

BYTES = {"4 B": 4, "1.8 MB": 1_800_000, "44 MB": 44_000_000}
WAYS = ("labkit", "raw mpi4py")
SHAPES = ("p2p", "collective")

PREPARE = """
import os, signal, threading, time
import numpy as np
from mpi4py import MPI
from labkit import comm
kept = 100 + comm.rank
"""

# One step of traffic that is right, and a call in which a rank waits for ever: for its neighbour, which waits as
# well, or for rank 0, which never comes.
STEPS = {
    ("labkit", "p2p"): "comm.sendrecv(x, (comm.rank + 1) % comm.size, y, (comm.rank - 1) % comm.size)",
    ("labkit", "collective"): "comm.all_reduce(x, op='max')",
    ("raw mpi4py", "p2p"): "MPI.COMM_WORLD.Sendrecv(x, (comm.rank + 1) % comm.size, 0, y, (comm.rank - 1) % comm.size)",
    ("raw mpi4py", "collective"): "MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x, MPI.MAX)",
}
WAITS = {
    ("labkit", "p2p"): "comm.recv(y, src=(comm.rank + 1) % comm.size, tag=9)",
    ("labkit", "collective"): "if comm.rank: comm.all_reduce(x)",
    ("raw mpi4py", "p2p"): "MPI.COMM_WORLD.Recv(y, (comm.rank + 1) % comm.size, 9)",
    ("raw mpi4py", "collective"): "if comm.rank: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x)",
}
ARRAYS = "x = np.ones({count}, np.float32); y = np.empty_like(x)"
# In the middle of whatever the rank is doing.
SOON = "if comm.rank == 1: threading.Timer(0.3, os.kill, (os.getpid(), signal.{signal})).start()"

CHECK = """
assert kept == 100 + comm.rank
assert comm.all_reduce(np.full({count}, 1.0 + comm.rank, np.float32)).tolist()[-1] == comm.size * (comm.size + 1) / 2
assert MPI.COMM_WORLD.allreduce(comm.rank) == comm.size * (comm.size - 1) // 2
"""


@dataclass(frozen=True)
class Case:
    """One fault in one kind of traffic; `fault`, `size`, `way` and `shape` are from the lists of this module."""

    fault: str
    size: str
    way: str
    shape: str

    def __str__(self) -> str:
        return f"{self.fault}, {self.way}, {self.shape}, {self.size}"

    @property
    def arrays(self) -> str:
        """Code that makes the messages."""
        return ARRAYS.format(count=BYTES[self.size] // 4)

    @property
    def step(self) -> str:
        """Code of one step that is right."""
        return STEPS[self.way, self.shape]

    @property
    def wait(self) -> str:
        """Code of a call that never ends."""
        return WAITS[self.way, self.shape]

    def endless(self, begin: str = "") -> str:
        """Code of steps without end."""
        return "\n".join([self.arrays, begin, f"while True: {self.step}"])


@dataclass
class Outcome:
    """How a case ended.

    Attributes
    ----------
    prompt_s
        Seconds from the fault, or from the request that ended the cell, to the notebook's prompt. A deadlock has to
        be proven first, and an error's other ranks get half a second to end by themselves.
    healed_s
        Seconds to start the lost rank again; None where none was lost.
    wrong
        What was not as it must be, empty if all was.
    """

    case: Case
    prompt_s: float = 0.0
    healed_s: float | None = None
    wrong: list[str] = field(default_factory=list)


def cases() -> Iterator[Case]:
    """Every fault in every kind of traffic."""
    for way, shape, size, fault in product(WAYS, SHAPES, BYTES, FAULTS):
        yield Case(fault, size, way, shape)


def prepare(lab: Lab) -> None:
    """Give the ranks what the cases use; a rank that is started again gets it, too."""
    lab.run(PREPARE, setup=True)


def try_out(lab: Lab, case: Case) -> Outcome:
    """Make the fault in `lab`, which has been prepared, and look whether everything comes back."""
    outcome = Outcome(case)
    began = time.monotonic()
    try:
        FAULTS[case.fault](lab, case, outcome)
    except (ClusterError, CellError, CellInterrupted) as problem:
        outcome.prompt_s = outcome.prompt_s or time.monotonic() - began
        outcome.wrong.append(f"{type(problem).__name__}: {problem}")
    try:
        lab.run(CHECK.format(count=BYTES[case.size] // 4), show=False, deadline=60)
    except (ClusterError, CellError) as problem:
        outcome.wrong.append(f"afterwards: {problem}")
    return outcome


def expect(lab: Lab, outcome: Outcome, error: type[BaseException], code: str, deadline: float | None = None) -> str:
    """Run a cell that must end with `error`; gives the error's text, and notes the time and what was not as it must."""
    began = time.monotonic()
    text = ""
    try:
        lab.run(code, show=False, deadline=60 if deadline is None else deadline)
        outcome.wrong.append(f"the cell ended without {error.__name__}")
    except (CellError, CellInterrupted) as problem:
        text = str(problem)
        if not isinstance(problem, error):
            outcome.wrong.append(f"{type(problem).__name__} and no {error.__name__}: {problem}")
        if problem.stuck:
            outcome.wrong.append(f"stuck: {problem.stuck}")
    outcome.prompt_s = time.monotonic() - began - (deadline or 0)
    return text


def deadlock(lab: Lab, case: Case, outcome: Outcome) -> None:
    """Every rank waits, for a message or for a rank that has left the collective out."""
    expect(lab, outcome, DeadlockError, "\n".join([case.arrays, case.step, case.wait]))


def error(lab: Lab, case: Case, outcome: Outcome) -> None:
    """Rank 0 has an error, the others wait for it."""
    code = [case.arrays, case.step, "if comm.rank == 0: raise ValueError('on purpose')", f"while True: {case.step}"]
    text = expect(lab, outcome, CellError, "\n".join(code))
    if "rank 0 failed first: ValueError: on purpose" not in text:
        outcome.wrong.append(f"the first error is not named: {text}")


def interrupt(lab: Lab, case: Case, outcome: Outcome) -> None:
    """The user interrupts ranks that are in the middle of their messages."""
    lab.run(case.endless(), block=False)
    limit = time.monotonic() + 10
    while time.monotonic() < limit and any(row.state not in ("computing", "waiting") for row in lab.status()):
        time.sleep(0.02)
    began = time.monotonic()
    lab.interrupt()
    outcome.prompt_s = time.monotonic() - began


def deadline(lab: Lab, case: Case, outcome: Outcome) -> None:
    """A deadline passes while the ranks are in the middle of their messages."""
    expect(lab, outcome, CellDeadlineError, case.endless(), deadline=0.5)


def kill(lab: Lab, case: Case, outcome: Outcome) -> None:
    """Rank 1 is killed in the middle of its messages, and started again."""
    text = expect(lab, outcome, CellError, case.endless(SOON.format(signal="SIGKILL")))
    outcome.prompt_s -= 0.3
    if "rank 1 failed first: RankDiedError" not in text:
        outcome.wrong.append(f"the lost rank is not named: {text}")
    began = time.monotonic()
    if lab.heal() != [1]:
        outcome.wrong.append("rank 1 was not started again")
    outcome.healed_s = time.monotonic() - began


def stop(lab: Lab, case: Case, outcome: Outcome) -> None:
    """Rank 1 is stopped in the middle of its messages, named as such, and resumed."""
    began = time.monotonic()
    try:
        lab.run(case.endless(SOON.format(signal="SIGSTOP")), show=False, deadline=1.0)
        outcome.wrong.append("the cell ended by itself")
    except CellDeadlineError as problem:
        outcome.prompt_s = time.monotonic() - began - 1.0
        # Who was in the middle of a long message with it comes back when it goes on.
        if 1 not in problem.stuck or any("SIGSTOP" not in why for why in problem.stuck.values()):
            outcome.wrong.append(f"the stopped rank is not named: {problem}")
    lab.resume(1)
    lab.interrupt()


FAULTS: dict[str, Callable[[Lab, Case, Outcome], None]] = {
    "deadlock": deadlock,
    "error": error,
    "interrupt": interrupt,
    "deadline": deadline,
    "kill": kill,
    "stop": stop,
}


def table(outcomes: list[Outcome]) -> list[tuple[str, ...]]:
    """A row for each fault and way: fault, way, cases, median and worst seconds to the prompt, median of healing."""
    rows: list[tuple[str, ...]] = []
    for fault, way in product(FAULTS, WAYS):
        mine = [outcome for outcome in outcomes if (outcome.case.fault, outcome.case.way) == (fault, way)]
        if not mine:
            continue
        times = [outcome.prompt_s for outcome in mine]
        heals = [outcome.healed_s for outcome in mine if outcome.healed_s is not None]
        good = sum(not outcome.wrong for outcome in mine)
        rows.append(
            (
                fault,
                way,
                f"{good} of {len(mine)}",
                f"{median(times):.2f} s",
                f"{max(times):.2f} s",
                f"{median(heals):.1f} s" if heals else "",
            )
        )
    return rows
