"""On a rank: a failing test ends the whole world at once, so that no other rank waits for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.failed:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        print(f"\nFAILED on rank {world.rank} of {world.size}: {item.nodeid}\n{report.longreprtext}", flush=True)
        sys.stderr.flush()
        world.Abort(1)


@pytest.fixture(autouse=True)
def _together() -> None:
    """Every test begins on all ranks at once, so that a late rank cannot meet an earlier test's messages."""
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()


@pytest.fixture(scope="module")
def watching() -> Iterator[None]:
    """Raw calls are watched while a module's tests run."""
    from mpi4py import MPI

    from labkit.comm import watched

    watched.install()
    yield
    watched.remove()
    assert MPI.COMM_WORLD.handle == watched.base().handle
