"""Going on without the ranks that have died, in the middle of a program: no lab and no notebook is needed.

A rank whose call ends with an error knows that something is wrong, not what the others know: some may have finished
that call, some are blocked in MPI, some compute and will come to their next call in a while. So the one that notices

1. revokes the communicator: whoever is or will be in a call on it gets an error as well and comes here, too;
2. tells all others that it is here, and waits until all that live are. This wait can be interrupted;
3. shrinks (MPI's user-level fault mitigation): the ranks that are left get a communicator. Everybody being here, this
   blocks no longer than MPI itself needs;
4. makes labkit's communicator of it, and agrees with the others that all have one (MPI's Agree). Another rank may die
   meanwhile, and be noticed by some only; MPI gives all the same answer, and if it is no, all begin again at 2.

Open MPI 5.0 has a Shrink that does not block, but it fails on a communicator that has lost a rank ("an error 75 was
found during schedule"); hence 2.
"""

from __future__ import annotations

import ctypes
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from labkit.comm.communicator import Communicator, base, current, known_generation, world
from labkit.comm.errors import ArgumentError, CommError
from labkit.comm.lost import gone
from labkit.comm.making import Making
from labkit.comm.mpi import MPI, REVOKES
from labkit.comm.plain import Plain
from labkit.comm.waiting import Wait, until

__all__ = ["bearing", "bears", "can_survive", "death_in", "part", "survivors", "without"]

NEWS_S = 1.0
"""How long the news of a death may take from rank to rank; it was seen to take 10 to 20 ms."""
GRACE_S = 1.0
"""An interrupted rank that has told the others it is here waits this long for them: they rely on it in Shrink."""
_TAG = 30_011
"""Nobody else sends under it on what worlds are made from."""


class _State:
    bearing = 0
    without: tuple[int, set[int]] = 0, set()
    """A generation, and the world ranks that this rank has gone on without in it."""


_state = _State()


def can_survive() -> bool:
    """Whether this MPI lets ranks go on when another one dies."""
    return REVOKES


def bears() -> bool:
    """Whether this rank goes on when another one dies now."""
    return _state.bearing > 0


def without() -> tuple[int, ...]:
    """World ranks that this rank has gone on without, since the world was made."""
    generation, ranks = _state.without
    return tuple(sorted(ranks)) if generation == known_generation() else ()


@contextmanager
def bearing() -> Iterator[None]:
    """Say to the lab, as long as the ``with`` block runs, that another rank's death need not end the cell."""
    _state.bearing += 1
    try:
        yield
    finally:
        _state.bearing -= 1


def death_in(group: Communicator) -> bool:
    """Whether an error on `group` comes of a rank's death; waits a moment for the news, since others may know first."""

    def known() -> bool:
        with suppress(MPI.Exception):
            group.private.Iprobe(MPI.ANY_SOURCE, _TAG)  # lets MPI hear of it
        return bool(gone(group)) or bool(group.private.Is_revoked())

    if not REVOKES:
        return False
    end = time.monotonic() + NEWS_S
    until(lambda: known() or time.monotonic() > end, lambda: _about(group))
    return known()


def survivors(group: Communicator | None = None) -> Communicator:
    """The communicator of the ranks of `group` that are left. Collective among them; they keep their order.

    `group` cannot be used any more; the world can, once ``lab.heal()`` or ``lab.shrink()`` has mended it.

    Parameters
    ----------
    group
        The world (default), or what this function has returned.

    Raises
    ------
    CommError
        Where the MPI ends all ranks when one dies.
    ArgumentError
        For another communicator.
    """
    lost_in = current(group)
    if not REVOKES:
        raise CommError(
            f"{lost_in.who('survivors')}: this MPI ends all ranks when one dies. Cure: Open MPI from version 5 on, "
            "started by mpiexec --with-ft ulfm (as labkit.start() and labkit train do)."
        )
    root = _root(lost_in)
    _revoke(lost_in)
    left = _settle(lost_in, root, part=False)
    assert left is not None
    return left


def part(group: Communicator) -> Communicator | None:
    """Leave `group` for good, all ranks together. Collective, but ranks in `survivors` will do as well.

    Before what cannot be gone back on: when a rank dies in the last call of all, some may think that they are done
    and leave, while others would begin that call again and wait for them.

    Returns
    -------
    Communicator or None
        None on all ranks: all have come here and live. Otherwise what `survivors` returns, on all.
    """
    return _settle(group, _root(group), part=True) if REVOKES else None


def _root(group: Communicator) -> Plain:
    root = base() if group is world() else group.root
    if root is None:
        raise ArgumentError(f"{group.who('survivors')}: only the world has survivors, or what this has returned.")
    return root


def _settle(group: Communicator, root: Plain, *, part: bool) -> Communicator | None:
    """What `part` and `survivors` do."""
    with _interrupts_deferred() as asked:
        _meet(group, root, asked)
        if _all_say(root, part):
            return None
        while True:
            root = Plain(root.Shrink())
            making = Making(root)
            if _all_say(root, _see_through(making, root, group)):
                break
            _meet(group, root, asked)
    mpi, private = making.made()
    numbers = MPI.Group.Translate_ranks(root.Get_group(), list(range(root.size)), group.private.Get_group())
    members = tuple(group.members[number] for number in numbers)
    name = f"survivors {', '.join(map(str, members))}"
    left = Communicator(mpi, private, making.ballot(), name, group.generation, members)
    left.root = root
    generation, before = _state.without
    lost = set(group.members) - set(members)
    if lost:
        _end_alone()
    _state.without = left.generation, lost | (before if generation == left.generation else set())
    return left


def _end_alone() -> None:
    """Let this process end without the others. MPI_Finalize would wait for all ranks.

    In Open MPI 5.0.11 that wait never ended in about one of six runs in which two ranks had died. Its setting
    ``async_mpi_finalize`` leaves it out; it is read when MPI ends, and the library has it as a variable of that name.
    """
    with suppress(OSError, ValueError):
        ctypes.c_bool.in_dll(ctypes.CDLL("libmpi.so.40"), "ompi_async_mpi_finalize").value = True


def _see_through(making: Making, root: Plain, group: Communicator) -> bool:
    """Finish `making`; False when one of its ranks has died meanwhile."""

    def look() -> None:
        if root.Get_failed().size:
            raise CommError("another rank has died meanwhile")

    try:
        until(making.over, lambda: _about(group), None, look)
    except (MPI.Exception, CommError):
        return False
    return True


def _all_say(root: Plain, yes: bool) -> bool:
    """Whether all ranks live and say yes: the same answer on all."""
    try:
        return bool(root.Agree(yes))
    except MPI.Exception:  # one has died: MPI tells all of them so, or none
        return False


def _meet(group: Communicator, root: Plain, asked: list[float]) -> None:
    """Tell all ranks that this one is here, and wait until all that live have told so."""
    others = [rank for rank in range(root.size) if rank != root.rank]
    word = bytearray(1)
    sent = [root.Isend([word, MPI.BYTE], rank, _TAG) for rank in others]
    awaited = {rank: root.Irecv([bytearray(1), MPI.BYTE], rank, _TAG) for rank in others}
    group.kept.append((word, sent, awaited))  # MPI may still touch them when this is given up

    def here() -> bool:
        failed = root.Get_failed()
        dead = set(MPI.Group.Translate_ranks(failed, list(range(failed.size)), root.Get_group()))
        for rank, request in tuple(awaited.items()):
            if rank in dead or _over(request):
                del awaited[rank]
        if asked and time.monotonic() > asked[0] + GRACE_S:
            raise KeyboardInterrupt
        return not awaited

    until(here, lambda: _about(group))


def _over(request: MPI.Request) -> bool:
    try:
        return bool(request.Test())
    except MPI.Exception:  # its sender has died
        return True


def _revoke(group: Communicator) -> None:
    """Let every call on `group` and its parts fail, on all ranks."""
    parts = [group]
    if group.hosts is not None:
        parts += [part for part in (group.hosts.inside, group.hosts.across) if part is not None]
    for part in parts:
        part.abandoned = part.abandoned or "one of its ranks has died"
        for mpi in (part.mpi, part.private):
            with suppress(MPI.Exception):
                if not mpi.Is_revoked():
                    mpi.Revoke()


@contextmanager
def _interrupts_deferred() -> Iterator[list[float]]:
    """Note when Ctrl-C comes, and raise it at the end: a rank that left Shrink or Agree would let the others wait."""
    asked: list[float] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.signal(signal.SIGINT, lambda *_: asked.append(time.monotonic()))
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt


def _about(group: Communicator) -> Wait:
    text = "survivors(), which every rank that is left must call,"
    return Wait("survivors", group.rank, communicator=group.name, members=group.members, text=text)
