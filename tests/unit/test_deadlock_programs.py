"""The verdict on random programs whose end is known: never too early, never wrong, never missing.

The programs run in a simulation: steps in random order, large messages that take their time, and ranks that are asked
one after the other while the rest goes on.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from labkit.cluster.deadlock import verdict
from tests.faults.model import Exchange, Program, outcome
from tests.faults.snapshots import Simulation, Style, pairs
from tests.faults.strategies import programs

MANY = settings(max_examples=400, deadline=None, derandomize=True)


def check(program: Program, style: Style, seed: int, steps: int) -> None:
    end = outcome(program)
    event(end.kind)
    simulation = Simulation(program, style, seed)
    final = Simulation(program, style, 0)
    final.settle()
    for before, now in pairs(simulation, looks=6, most_steps=steps):
        found = verdict(before, now, settled_s=0, patience_s=math.inf, at=simulation.time)
        if found is not None:
            assert set(found.ranks) <= end.blocked
            assert all(simulation.machine.position[rank] == final.machine.position[rank] for rank in found.ranks)
    simulation.settle()
    assert simulation.machine.position == final.machine.position
    before = simulation.look()
    simulation.settle()
    now = simulation.look()
    found = verdict(before, now, settled_s=0, patience_s=0, at=simulation.time)
    assert set(found.ranks if found else ()) == end.blocked
    if found is None:
        return
    ring = zip(found.cycle, [*found.cycle[1:], *found.cycle[:1]], strict=True)
    if style == "labkit":
        assert all(awaited in end.awaits[rank] for rank, awaited, _ in found.edges if found.kind != "mismatch")
        assert all(awaited in end.awaits[rank] for rank, awaited in ring)
        in_exchange = [rank for rank in end.blocked if isinstance(simulation.machine.operation(rank), Exchange)]
        if not in_exchange and found.kind != "mismatch":
            assert bool(found.cycle) == end.has_cycle
    assert found.cure
    assert found.headline == "no rank can go on." or len(found.ranks) < program.size
    assert len(found.lines) == program.size


@MANY
@given(programs(), st.integers(0, 2**20), st.integers(0, 30))
def test_labkits_calls(program: Program, seed: int, steps: int) -> None:
    check(program, "labkit", seed, steps)


@MANY
@given(programs(mismatches=False), st.integers(0, 2**20), st.integers(0, 30))
def test_raw_calls(program: Program, seed: int, steps: int) -> None:
    check(program, "mpi4py", seed, steps)


@MANY
@given(programs(), st.integers(0, 2**20))
def test_the_models_outcome_depends_on_no_order(program: Program, seed: int) -> None:
    end = outcome(program)
    simulation = Simulation(program, "labkit", seed)
    simulation.wander(200)
    simulation.settle()
    machine = simulation.machine
    assert {rank for rank in simulation.ranks if machine.operation(rank) is not None} == end.blocked
    assert machine.failed == end.mismatched
    assert machine.got == end.got


@pytest.mark.parametrize("kind", ["runs through", "deadlock", "mismatch"])
def test_the_programs_are_of_every_kind(kind: str) -> None:
    kinds: list[str] = []

    @settings(max_examples=200, deadline=None, derandomize=True, database=None)
    @given(programs())
    def collect(program: Program) -> None:
        kinds.append(outcome(program).kind)

    collect()
    assert kinds.count(kind) >= len(kinds) // 20
