"""A lab that has lost ranks: started again under their numbers, or gone on without.

The ranks that are left do the work (see `labkit.comm.recovery`); here they are told to, all at once, and the lab's
records are brought up to date.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from labkit.cluster import remote
from labkit.cluster.bring_up import RankInfo, World, check_one_world, introductions, launcher_said
from labkit.cluster.errors import ClusterError
from labkit.cluster.processes import lives
from labkit.cluster.seen import rank_list

__all__ = ["COPY", "gone", "respawn", "shrink"]

SHRINK_LIMIT_S = 20.0
FAREWELL_LIMIT_S = 10.0

COPY = """
from labkit import comm as _comm
if _comm.rank == {source}:
    for _rank in {targets}:
        _comm.send_object({{_name: globals()[_name] for _name in {names}}}, dst=_rank)
else:
    globals().update(_comm.recv_object(src={source}))
"""
"""Run on the rank that has the variables and on those that get them."""


def gone(world: World) -> list[int]:
    """Ranks whose process has ended."""
    found = []
    for info in world.ranks:
        process = info.process()
        if process is None or not lives(process) or info.engine not in world.client.ids:
            found.append(info.rank)
    return found


def respawn(world: World, missing: list[int], timeout: float) -> None:
    """Start the ranks `missing` again; the others must be at their prompts. All have new engine ids afterwards.

    Raises
    ------
    ClusterError
        When this MPI cannot do it, or the ranks do not come up within `timeout` seconds.
    """
    left = survivors(world, missing)
    generation = next_generation(world, left)
    await_farewell(world, missing)
    known, wanted = set(world.client.ids), len(missing)
    results = [world.client[info.engine].apply_async(remote.respawn, missing, generation) for info in left]
    deadline = time.monotonic() + timeout
    while len(new := [engine for engine in world.client.ids if engine not in known]) < wanted or not all(
        result.ready() for result in results
    ):
        failed = next((result for result in results if result.ready() and not result.successful()), None)
        if failed is not None or time.monotonic() > deadline:
            why = f"{failed.exception()}" if failed else f"it is not there after {timeout:g} s"
            said = launcher_said(world.cluster.engine_set) if world.cluster is not None else ""
            raise ClusterError(
                f"{rank_list(missing).capitalize()} could not be started again: {why}.\n{said}", "lab.restart()"
            )
        time.sleep(0.01)
    update(world, [info.engine for info in left] + new)


def shrink(world: World, missing: list[int]) -> None:
    """Go on without the ranks `missing`; the others are numbered anew, in their old order.

    Raises
    ------
    ClusterError
        When this MPI cannot do it, or the ranks that are left do not agree in time.
    """
    left = survivors(world, missing)
    generation = next_generation(world, left)
    try:
        view(world, left).apply_async(remote.shrink, generation).get(timeout=SHRINK_LIMIT_S)
    except (TimeoutError, FutureTimeout):
        raise ClusterError("The ranks that are left did not come together.", "lab.restart()") from None
    update(world, [info.engine for info in left])


def survivors(world: World, missing: list[int]) -> list[RankInfo]:
    """Ranks that are left, if they can go on without the others."""
    left = [info for info in world.ranks if info.rank not in missing]
    if not left:
        raise ClusterError("No rank is left.", "lab.restart()")
    if not all(ask(world, left, remote.survives)):
        raise ClusterError(f"{world.session.mpi} cannot go on after a rank's death; Open MPI can.", "lab.restart()")
    return left


def await_farewell(world: World, missing: list[int]) -> None:
    """Wait until the controller knows of the deaths: a new rank asks for the engine id that was the old one's."""
    old = {info.engine for info in world.ranks if info.rank in missing}
    deadline = time.monotonic() + FAREWELL_LIMIT_S
    while old & set(world.client.ids) and time.monotonic() < deadline:
        time.sleep(0.01)


def next_generation(world: World, left: list[RankInfo]) -> int:
    """A number greater than that of any communicator the ranks know."""
    return 1 + int(max(ask(world, left, remote.generation)))


def ask(world: World, ranks: list[RankInfo], question: Callable[[], Any]) -> list[Any]:
    """The answers of some ranks, which must be at their prompts."""
    from ipyparallel.error import CompositeError

    try:
        answers: list[Any] = view(world, ranks).apply_async(question).get(timeout=10)
    except CompositeError:
        raise ClusterError("Another rank has died at this moment.", "the same call again") from None
    return answers


def view(world: World, ranks: list[RankInfo]) -> Any:
    """ipyparallel's view on some ranks; it does not wait."""
    some = world.client[[info.engine for info in ranks]]
    some.block = False
    return some


def update(world: World, engines: list[int]) -> None:
    """Put on record who the ranks are now."""
    session = world.session
    session.processes = [mark for mark in session.processes if "rank" not in mark.role]
    world.ranks = introductions(world.client, session, engines)
    session.ranks = len(world.ranks)
    session.save()
    check_one_world(world.ranks, session.ranks)
