"""Why collectives cannot hang: all ranks agree to be in the same call before any data moves.

Phase 1, *agreement*: a tiny all-reduce of a hash that stands for the call (operation, op, algorithm, root, dtype,
shape), waited for so that Ctrl-C and deadlines work. It completes only once every rank is in. If the hashes differ,
the ranks exchange descriptions and every rank raises `MismatchError`; nothing has moved, and nothing is spoilt.

Phase 2, *data*: as every rank is known to be in the same call, MPI's blocking collective can be used without danger.

Giving up must not leave another rank in the blocking phase. A rank gives up no sooner than `HOLD_NS` after it
entered. Ranks therefore know from the spread of their entry times (carried by the same all-reduce) whether one of
them may have given up meanwhile; only then do they confirm once more that all are still there. A Ctrl-C that comes
after everybody agreed lets the call finish first.
"""

from __future__ import annotations

import hashlib
import operator
import struct
import time
from collections.abc import Callable
from itertools import starmap
from typing import TYPE_CHECKING, Any

from labkit.comm.errors import CommError, MismatchError
from labkit.comm.mpi import MPI
from labkit.comm.waiting import Wait, clock, place, until

if TYPE_CHECKING:
    from labkit.comm.communicator import Communicator

__all__ = ["Call", "Vote", "collective"]

HOLD_NS = 50_000_000
"""A rank stays in a call at least this long before it gives up."""
LATE_NS = HOLD_NS // 2
"""Entry times further apart than this are confirmed; half of the above leaves a stalled rank 25 ms."""
GRACE_NS = 1_000_000_000
"""How long an interrupted rank waits for the others' confirmations."""
DESCRIPTION_BYTES = 400

_FEW_TESTS = range(20)
"""Where all ranks come at once, the agreement is over before this: no clock is asked."""

_four = struct.Struct("4q")
_pack, _unpack = _four.pack_into, _four.unpack_from


class Call:
    """One collective call as a rank describes it: what must be the same on all ranks."""

    __slots__ = ("count", "dtype", "group", "operation", "plan", "signature", "text")

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
        self.signature = int.from_bytes(hashlib.blake2b(self.text.encode(), digest_size=8).digest(), "big") >> 2 | 1
        """A positive number that differs, for all practical purposes, where the texts differ."""
        self.count = count
        self.dtype = dtype
        self.plan = plan
        """What the operation wants to find again next time, such as the MPI operator."""

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


class Vote:
    """A persistent all-reduce (MPI 4) of four integers by maximum. Starting it again costs less than a new one."""

    __slots__ = ("_request", "mine", "outcome", "start", "test")

    def __init__(self, mpi: MPI.Intracomm) -> None:
        self.mine = bytearray(_four.size)
        self.outcome = bytearray(_four.size)
        self._request = mpi.Allreduce_init([self.mine, 4, MPI.INT64_T], [self.outcome, 4, MPI.INT64_T], MPI.MAX)
        self.start = self._request.Start
        self.test = self._request.Test

    def prepare(self, a: int, b: int, c: int, d: int) -> None:
        """Set this rank's numbers, and clear the outcome: it stays zero until the vote is over."""
        _pack(self.outcome, 0, 0, 0, 0, 0)
        _pack(self.mine, 0, a, b, c, d)

    def over(self) -> bool:
        """Whether the vote was started and is over."""
        return bool(self.test()) and any(self.outcome)

    def free(self) -> None:
        """Give MPI's request back."""
        self._request.Free()


def collective(
    group: Communicator,
    call: Call,
    timeout: float | None,
    function: Callable[..., object] | None = None,
    args: tuple[Any, ...] = (),
    *,
    atomic: bool = True,
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

    Raises
    ------
    MismatchError, DeadlineError
        As described above.
    CommError
        When an earlier collective was given up here, or MPI reports a fault such as a lost rank.
    """
    if group.abandoned is not None:
        raise CommError(
            f"{group.who(call.operation)}: no collective can run on communicator '{group.name}' any more: "
            f"{group.abandoned}. Run comm.renew() on every rank."
        )
    vote, signature = group.entry, call.signature
    # Python looks for signals between bytecodes, so an interrupt may come anywhere below, but not within one call
    # of a C function. Each step therefore leaves a trace by which `_settle` knows whether it was begun: the vote's
    # outcome, and this iterator, which is used up in the same C call that calls `function`.
    todo = iter((args,))
    entered = time.perf_counter_ns()
    log = group.log
    log.append((log[-1][0] + 1, call.text))
    try:
        _pack(vote.outcome, 0, 0, 0, 0, 0)
        _pack(vote.mine, 0, signature, -signature, entered, -entered)
        clock.about, clock.began_ns = call.about, entered
        vote.start()
        test = vote.test
        for _ in _FEW_TESTS:
            if test():
                break
        else:
            until(test, call.about, timeout)
        highest, lowest, last, first = _unpack(vote.outcome)
        if highest != signature or lowest != -signature:
            raise _mismatch(group, call, timeout)
        if last + first > LATE_NS:
            _confirm(group)
            until(group.confirmation.over, call.about, timeout)
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
        raise CommError(
            f"{group.who(call.operation)}: MPI reports: {error.Get_error_string()} (in {call.text}, {place()}). "
            "A rank may have died; run comm.renew() on every rank if all are there, or restart the ranks."
        ) from error
    except MismatchError:
        clock.about = None
        raise
    except BaseException as stop:
        clock.about = None
        settled = False
        while not settled:
            try:
                _settle(group, call, stop, entered, function, todo, atomic)
                settled = True
            except MPI.Exception:
                group.abandoned = f"{call.text} failed"
                settled = True
            except BaseException:  # another Ctrl-C: settle first; it goes on where it was and ends in a second
                continue
        raise


def _settle(
    group: Communicator,
    call: Call,
    stop: BaseException,
    entered: int,
    function: Callable[..., object] | None,
    todo: Any,
    atomic: bool,
) -> None:
    """Interrupted by `stop`: finish the call if the others rely on this rank, or else mark it as given up."""
    given_up = f"rank {group.rank} gave up {call.text} ({type(stop).__name__})"
    vote = group.entry
    while not vote.test():
        if time.perf_counter_ns() - entered > HOLD_NS:
            group.abandoned = given_up
            return
        time.sleep(50e-6)
    if not any(vote.outcome):
        return  # the interrupt came before this rank had entered
    highest, lowest, last, first = _unpack(vote.outcome)
    if highest != call.signature or lowest != -call.signature:
        group.abandoned = given_up
        return
    if last + first > LATE_NS:
        _confirm(group)
        until_ns = time.perf_counter_ns() + GRACE_NS
        while not group.confirmation.over():
            if time.perf_counter_ns() > until_ns:
                group.abandoned = given_up
                return
            time.sleep(50e-6)
    if function is None:
        return
    if operator.length_hint(todo) == 0:  # begun; a single MPI call has then also ended
        if not atomic:
            group.abandoned = given_up
    elif atomic:
        for _ in starmap(function, todo):
            pass
    else:
        group.abandoned = given_up


def _confirm(group: Communicator) -> None:
    """Start the second vote of this call, unless that was done already and an interrupt came between."""
    vote, serial = group.confirmation, _unpack(group.entry.outcome)[2]  # the latest entry time marks the call
    if _unpack(vote.mine)[0] != serial:
        vote.prepare(serial, 0, 0, 0)
        vote.start()


def _mismatch(group: Communicator, call: Call, timeout: float | None) -> MismatchError:
    """Exchange descriptions and put every rank's side into one error, the same on all ranks."""
    own = f"{call.text}  ({place()})".encode()[:DESCRIPTION_BYTES].ljust(DESCRIPTION_BYTES)
    everyone = bytearray(DESCRIPTION_BYTES * group.size)
    request = group.private.Iallgather([own, MPI.BYTE], [everyone, MPI.BYTE])
    until(request.Test, call.about, timeout)
    sides = [
        everyone[start : start + DESCRIPTION_BYTES].decode(errors="replace").rstrip()
        for start in range(0, len(everyone), DESCRIPTION_BYTES)
    ]
    lines = "\n".join(f"  rank {rank}  {side}" for rank, side in enumerate(sides))
    return MismatchError(
        f"the ranks of '{group.name}' are not in the same call:\n{lines}\n"
        "No data has moved. Make the same call with the same arguments on every rank."
    )
