"""Random programs on real ranks: each ends as the model says, and the ranks are as good as before.

``LABKIT_PROGRAMS=300`` tries other programs in every run, and so many of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count, zip_longest

import pytest
from hypothesis import HealthCheck, Phase, event, example, given, note, settings
from hypothesis import strategies as st

import labkit
from labkit.cluster.cells import CellError
from labkit.cluster.deadlock import Verdict
from labkit.cluster.lab import Lab
from tests.conftest import leaves_nothing
from tests.faults.model import Call, Exchange, Machine, On, Outcome, Program, Receive, Send, at_its_end, outcome
from tests.faults.programs import Library, cell
from tests.faults.strategies import programs

RANKS = 4
WANTED = os.environ.get("LABKIT_PROGRAMS")
LIMIT_S = 30.0
"""A program that is neither through nor judged by then hangs: the test fails by it."""

FREED = ("interrupted", "CommError", "RevokedError")
"""How a rank ends that is freed: by Ctrl-C, or since another one was freed before."""

AFTERWARDS = """
assert kept == mpi_rank
assert comm.all_reduce(np.array([mpi_rank + 1.0]))[0] == 10
assert MPI.COMM_WORLD.allreduce(mpi_rank + 1) == 10
"""

MANY = settings(
    max_examples=int(WANTED or 40),
    derandomize=WANTED is None,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],  # after a failure the lab is another: no smaller program
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

numbers = count(1)


@pytest.fixture(autouse=True)
def _clean() -> None:
    """The lab stays from program to program: whether it leaves nothing is seen at the end."""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """One lab for all programs: what one of them leaves would spoil the next."""
    with leaves_nothing(), labkit.start(RANKS) as running:
        running.run("import numpy as np\nfrom mpi4py import MPI\nfrom labkit import comm\nkept = mpi_rank", show=False)
        yield running


# In plain mpi4py, ranks in different collectives are outside MPI's rules: what becomes of them is not defined.
written = st.sampled_from(["labkit", "mpi4py"]).flatmap(
    lambda library: st.tuples(st.just(library), programs(mismatches=library == "labkit"))
)


# One of the four sides has met its other side; that this is over is proven from the message's size.
HALF = Program(((Exchange(Send(1, 3), Receive(1, 0)),), (Exchange(Send(0, 3), Receive(0, 3)),)))


@pytest.mark.timeout(1200)
@MANY
@given(written)
@example(("mpi4py", HALF))
def test_every_program_ends_as_it_must(lab: Lab, written: tuple[Library, Program]) -> None:
    library, program = written
    end = outcome(program)
    event(f"{library}: {end.kind}")
    code = cell(program, library, RANKS, next(numbers))
    note(f"{end}\n{code}")
    error = None
    try:
        lab.run(code, show=False, deadline=LIMIT_S)
    except CellError as problem:
        error = problem
    check(program, library, end, error)
    lab.run(AFTERWARDS, show=False, deadline=LIMIT_S)


def check(program: Program, library: Library, end: Outcome, error: CellError | None) -> None:
    if error is None:
        assert end.kind == "runs through"
        return
    text = str(error)
    assert not error.stuck, text
    for rank in range(RANKS):
        expected = "MismatchError" if rank in end.mismatched else FREED if rank in end.blocked else "finished"
        assert error.states[rank].startswith(expected), f"rank {rank} {error.states[rank]}: {text}"
    if end.mismatched:
        assert error.first is not None, text
        assert error.first.name == "MismatchError", text
        assert error.first.rank in end.mismatched, text
    else:
        assert error.verdict is not None, text
        check_verdict(program, library, end, error.verdict)


def check_verdict(program: Program, library: Library, end: Outcome, verdict: Verdict) -> None:
    named, text = set(verdict.ranks), str(verdict)
    # A rank that came late may not be proven to be stuck yet; one that is named must be.
    assert named, text
    assert named <= end.blocked, text
    event("names every rank that is stuck" if named == end.blocked else "names some of the ranks that are stuck")
    assert verdict.cure, text
    machine = at_its_end(program)
    if verdict.kind == "mismatch":
        assert any(_different(machine, on) for on in ("world", "pair")), text
        return
    ring = zip(verdict.cycle, [*verdict.cycle[1:], *verdict.cycle[:1]], strict=True)
    for rank, other in [*ring, *((rank, other) for rank, other, _ in verdict.edges)]:
        # Of a send and a receive at once, one may be over. Plain MPI does not show which.
        op = machine.operation(rank)
        either = {op.send.dst, op.receive.src} if isinstance(op, Exchange) and library == "mpi4py" else set()
        if isinstance(op, Call) and op.name == "broadcast" and library == "mpi4py":
            either = set(program.members(op.on))  # some are in the barrier behind it already
        assert other in end.awaits[rank] | either, text
    assert (verdict.kind == "deadlock") == bool(verdict.cycle), text
    if named == end.blocked and not any(isinstance(machine.operation(rank), Exchange) for rank in named):
        assert bool(verdict.cycle) == end.has_cycle, text


def _different(machine: Machine, on: On) -> bool:
    """Whether some ranks are in different collectives at one place."""
    calls = [machine.calls[on, rank] for rank in machine.program.members(on)]
    return any(len(set(place) - {None}) > 1 for place in zip_longest(*calls))
