"""Random programs on real ranks: each ends as the model says, and the ranks are as good as before."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, note, settings

import labkit
from labkit.cluster.cells import CellError
from labkit.cluster.lab import Lab
from tests.faults.model import Outcome, Program, outcome
from tests.faults.programs import Library, cell
from tests.faults.strategies import programs

RANKS = 4
PROGRAMS_EACH = 60
LIMIT_S = 30.0
"""A program that is neither through nor judged by then hangs: the test fails by it."""

MANY = settings(
    max_examples=PROGRAMS_EACH,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

numbers = itertools.count(1)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """One lab for all programs: what one of them leaves would spoil the next."""
    with labkit.start(RANKS) as running:
        running.run("import torch\nfrom labkit import comm\nkept = mpi_rank", show=False)
        yield running


def check(lab: Lab, program: Program, library: Library) -> None:
    end = outcome(program)
    code = cell(program, library, RANKS, next(numbers))
    note(f"{end}\n{code}")
    try:
        lab.run(code, show=False, deadline=LIMIT_S)
    except CellError as error:
        check_error(error, end)
        lab.run(
            "x = comm.all_reduce(torch.tensor([mpi_rank + 1.0]))\nassert (x.item(), kept) == (10.0, mpi_rank)",
            show=False,
            deadline=LIMIT_S,
        )
    else:
        assert end.kind == "runs through"


def check_error(error: CellError, end: Outcome) -> None:
    assert not error.stuck, str(error)
    if error.verdict is not None:
        # A rank that came late may not be proven to be stuck yet; one that is named must be.
        named = set(error.verdict.ranks)
        assert named and named <= end.blocked, str(error)
        assert error.verdict.cure, str(error)
        if error.verdict.cycle:
            ring = zip(error.verdict.cycle, [*error.verdict.cycle[1:], error.verdict.cycle[0]], strict=True)
            assert all(awaited in end.blocked for _, awaited in ring), str(error)
    else:
        assert error.first is not None and error.first.name == "MismatchError", str(error)
        assert error.first.rank in end.mismatched, str(error)


@pytest.mark.timeout(900)
@MANY
@given(program=programs())
def test_programs_written_with_labkit(lab: Lab, program: Program) -> None:
    check(lab, program, "labkit")
