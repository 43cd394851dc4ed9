"""Why collectives cannot hang: all ranks agree to be in the same call before any data moves.

Phase 1, *agreement*: every rank says which call it is in (operation, op, algorithm, root, dtype, shape, as one number)
and waits until all have said so, by a wait that Ctrl-C and deadlines can end. Ranks of one host do that on a board in
shared memory (`labkit.comm.board`), others by a tiny non-blocking all-reduce (`labkit.comm.vote`). If the calls differ,
the ranks exchange descriptions and every rank raises `MismatchError`; nothing has moved, and nothing is spoilt.

Phase 2, *data*: as every rank is known to be in the same call, MPI's blocking collective can be used without danger.

Giving up must not leave another rank in the blocking phase: a Ctrl-C that comes after everybody agreed lets the call
finish first. How a rank finds out is the larger part of board and vote.
"""

from __future__ import annotations

import hashlib
import operator
import time
from collections.abc import Callable
from itertools import starmap
from typing import TYPE_CHECKING, Any, Protocol

from labkit.comm.errors import CommError, MismatchError, RankDiedError
from labkit.comm.lost import fault
from labkit.comm.mpi import MPI
from labkit.comm.waiting import Wait, clock, place, until

if TYPE_CHECKING:
    from labkit.comm.communicator import Communicator

__all__ = ["Ballot", "Call", "collective"]

DESCRIPTION_BYTES = 400


class Ballot(Protocol):
    """How the ranks of a communicator agree: a `labkit.comm.board.Board`, or `labkit.comm.vote.Votes`.

    `sequence` is the collective's number on the communicator, `entered` the time at which the rank came, in ns.
    """

    def enter(self, call: Call, sequence: int, entered: int, /) -> None:
        """Tell the others that this rank is in the call."""

    def entered(self, sequence: int, /) -> bool:
        """Whether this rank has told the others so."""

    def agree(self, call: Call, sequence: int, timeout: float | None, /) -> bool:
        """Wait until all are in the call. False if they are in different ones."""

    def look(self, call: Call, sequence: int, /) -> None:
        """Raise `CommError` if another rank is known to have given up."""

    def leave(self, call: Call, sequence: int, entered: int, /) -> bool:
        """Give up. True if that is too late: all are in the call, and this rank must go through with it."""

    def mark_left(self, sequence: int, /) -> None:
        """Tell the others, if that can be done, that this rank has given up after all had agreed."""

    def drop(self) -> bool:
        """Let go of the memory, when the communicator is not used any more; False if MPI may still use it."""

    def free(self) -> None:
        """Give everything back. All ranks do so."""


class Call:
    """One collective call as a rank describes it: what must be the same on all ranks."""

    __slots__ = ("count", "dtype", "group", "operation", "plan", "signature", "slots", "text")

    def __init__(
        self,
        group: Communicator,
        operation: str,
        details: str,
        *,
        count: int | None = None,
        dtype: str | None = None,
        plan: Any = None,
    ) -> None:
        self.group = group
        self.operation = operation
        self.text = f"{operation}({details})"
        self.signature = int.from_bytes(hashlib.blake2b(self.text.encode(), digest_size=6).digest(), "big") & ~3 | 4
        """A number of 48 bits that differs, for all practical purposes, where the texts differ. Positive, and a
        multiple of 4: a word on a board has the phase there."""
        self.count = count
        self.dtype = dtype
        self.plan = plan
        """What the operation wants to find again next time, such as the MPI operator."""
        self.slots: Any = None
        """Where the ranks' data lies, for what is combined in shared memory."""

    def about(self) -> Wait:
        """What a rank in this call waits for."""
        group = self.group
        return Wait(
            self.operation,
            group.rank,
            "collective",
            communicator=group.name,
            members=group.members,
            sequence=group.sequence,
            signature=self.text,
            count=self.count,
            dtype=self.dtype,
            text=self.text,
        )


def collective(
    group: Communicator,
    call: Call,
    timeout: float | None,
    function: Callable[..., object] | None = None,
    args: tuple[Any, ...] = (),
    *,
    atomic: bool = True,
    local: bool = False,
) -> None:
    """Agree with all ranks on `call`, then run ``function(*args)``.

    Parameters
    ----------
    group, call, timeout
        Where, what, and for how many seconds at most to wait for the others.
    function, args
        Moves the data; None if being there is all (a barrier).
    atomic
        Whether `function` is a single MPI call, which nothing can interrupt. Otherwise it consists of waits that
        can be interrupted, and an interrupt leaves the communicator to be renewed.
    local
        Whether `function` needs no other rank and may be run again from the start after an interrupt.

    Raises
    ------
    MismatchError, DeadlineError
        As described above.
    CommError
        When an earlier collective was given up here, or when another rank gives this one up.
    RankDiedError
        When the process of a rank has ended.
    """
    if group.abandoned is not None:
        raise CommError(
            f"{group.who(call.operation)}: no collective can run on communicator '{group.name}' any more: "
            f"{group.abandoned}. Run comm.renew() on every rank."
        )
    ballot, log = group.ballot, group.log
    sequence = log[-1][0] + 1
    # Python looks for signals between bytecodes, so an interrupt may come anywhere below, but not within one call
    # of a C function. Each step therefore leaves a trace by which `_settle` knows whether it was begun: the ballot's,
    # and this iterator, which is used up in the same C call that calls `function`.
    todo = iter((args,))
    entered = time.perf_counter_ns()
    try:
        log.append((sequence, call.text))
        clock.about, clock.began_ns = call.about, entered
        ballot.enter(call, sequence, entered)
        if not ballot.agree(call, sequence, timeout):
            raise _mismatch(group, call, sequence, timeout)
        agreed = time.perf_counter_ns()
        clock.wait_ns += agreed - entered
        if function is not None:
            for _ in starmap(function, todo):
                pass
            clock.transfer_ns += time.perf_counter_ns() - agreed
        clock.about = None
    except MPI.Exception as error:
        clock.about = None
        group.abandoned = f"{call.text} failed"
        failure = fault(group, call.operation, error, call.text)
        if not isinstance(failure, RankDiedError):  # of a death all hear for themselves, and shall say so
            ballot.mark_left(sequence)
        raise failure from error
    except MismatchError:
        clock.about = None
        raise
    except BaseException as stop:
        clock.about = None
        undone = (group, call, sequence, entered, stop, function, args, todo, atomic, local)
        try:
            _end(*undone)
        except BaseException:  # another Ctrl-C, between two rounds of its loop
            _end(*undone)
        raise


def _end(
    group: Communicator,
    call: Call,
    sequence: int,
    entered: int,
    stop: BaseException,
    function: Callable[..., object] | None,
    args: tuple[Any, ...],
    todo: Any,
    atomic: bool,
    local: bool,
) -> None:
    """End a call that `stop` interrupted: finished, or given up."""
    while True:
        try:
            if not _settle(group, call, sequence, entered, function, args, todo, atomic=atomic, local=local):
                given_up = f"rank {group.rank} gave up {call.text} ({type(stop).__name__})"
                group.abandoned = group.abandoned or given_up
                group.ballot.mark_left(sequence)
            return
        except MPI.Exception:
            group.abandoned = f"{call.text} failed"
            group.ballot.mark_left(sequence)
            return
        except BaseException:  # another Ctrl-C: settle first; it goes on where it was and ends soon
            continue


def _settle(
    group: Communicator,
    call: Call,
    sequence: int,
    entered: int,
    function: Callable[..., object] | None,
    args: tuple[Any, ...],
    todo: Any,
    *,
    atomic: bool,
    local: bool,
) -> bool:
    """Interrupted: finish the call if the others rely on this rank. False if it is given up."""
    if not group.ballot.entered(sequence):
        if group.log[-1][0] == sequence:
            group.log.pop()
        return True
    begun = operator.length_hint(todo) == 0
    if not begun and not group.ballot.leave(call, sequence, entered):
        return False
    if function is None:
        return True
    if local:
        function(*args)
        return True
    if not begun and atomic:
        for _ in starmap(function, todo):
            pass
    return atomic  # begun: a single MPI call has then also ended


def _mismatch(group: Communicator, call: Call, sequence: int, timeout: float | None) -> MismatchError:
    """Exchange descriptions and put every rank's side into one error, the same on all ranks."""
    own = f"{call.text}  ({place()})".encode()[:DESCRIPTION_BYTES].ljust(DESCRIPTION_BYTES)
    everyone = bytearray(DESCRIPTION_BYTES * group.size)
    exchange: list[MPI.Request] = []
    kept = own, everyone, exchange
    group.kept.append(kept)  # stays there after an interrupt
    exchange.extend(starmap(group.private.Iallgather, (([own, MPI.BYTE], [everyone, MPI.BYTE]),)))
    until(exchange[0].Test, call.about, timeout, lambda: group.ballot.look(call, sequence))
    group.kept.remove(kept)
    sides = [
        everyone[start : start + DESCRIPTION_BYTES].decode(errors="replace").rstrip()
        for start in range(0, len(everyone), DESCRIPTION_BYTES)
    ]
    lines = "\n".join(f"  rank {rank}  {side}" for rank, side in enumerate(sides))
    return MismatchError(
        f"the ranks of '{group.name}' are not in the same call:\n{lines}\n"
        "No data has moved. Make the same call with the same arguments on every rank."
    )
