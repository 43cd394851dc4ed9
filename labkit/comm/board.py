"""How the ranks of one host agree: each writes what it is about to do on a board in shared memory, for all to read.

Every rank has one 8-byte word for collectives of odd number and one for those of even number. A word holds the
collective's number, a mark that stands for the call and its arguments, and a phase, and is written by a single store:
no order between several words is needed. A rank arrives by writing its word. It is in the same call with all others
once all words have its number and its mark. Two words are enough: to begin collective n + 2 a rank must have finished
n + 1, for which every other rank must have done with reading n.

Giving up must never leave another rank alone in MPI's blocking call:

- who wants to give up writes LEAVING, lets that become visible, and then reads all words. If some rank is not there
  yet, it writes LEFT, which is final. If all are there, somebody may have gone on already: it writes STAYED.
- who finds all words HERE or STAYED reads them a second time, and goes on only if they still are. LEAVING means to look
  again, LEFT to give up as well.

So nobody goes on where somebody left. Let G be the first to write LEFT: G wrote LEAVING, and after that saw that X was
not there. A rank that goes on saw X there before it began its second reading, in which it then finds G's LEAVING.
"""

from __future__ import annotations

import mmap
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from labkit.comm.errors import CommError
from labkit.comm.lost import died, gone
from labkit.comm.waiting import place, until

if TYPE_CHECKING:
    from labkit.comm.agreement import Call

__all__ = ["SLOT_BYTES", "Board", "length"]

SLOT_BYTES = 128 << 10
"""Room for each rank's data of one collective; there are two such slots a rank."""
PAUSE_S = 1e-3
"""Between a store and the look at what others stored meanwhile; a processor keeps a store back for less than 1 µs."""

_HERE, _LEAVING, _STAYED, _LEFT = range(4)
_NUMBERS, _NUMBER_AT = 0xFFFF, 48
_EVERY = 16
"""While a wait spins, MPI gets a turn at each so many looks."""
_WORDS_AT = 64
_ORDERED = platform.machine() in ("x86_64", "AMD64")
"""Whether other ranks see stores in the order in which they were made, so that data may be announced by a word."""


class Board:
    """A communicator's board as one of its ranks uses it.

    Attributes
    ----------
    carries_data
        Whether `slots` may be used: the processor keeps the order of stores.
    crowded
        Whether the ranks outnumber the cores.
    """

    def __init__(self, memory: mmap.mmap, rank: int, size: int, crowded: bool, turn: Callable[[], None]) -> None:
        self._memory = memory
        self._words = memoryview(memory)[_WORDS_AT : _data_at(size)].cast("Q")
        self._size, self._turn = size, turn
        self._own = rank, size + rank
        """Where this rank's word is in collectives of even and of odd number."""
        row = 8 * size
        self._spans = [(_WORDS_AT + parity * row, _WORDS_AT + (parity + 1) * row) for parity in (0, 1)]
        self._here = b""
        """The row of words once all ranks are in the call that this rank entered last."""
        self._looks = range(200 if crowded else 300)
        """Where all ranks come at once, the agreement is over before this: no clock is asked."""
        self._leaving = 0, 0.0
        """Number of the collective that this rank wants to leave, and the time since when the others can see that."""
        self.carries_data = _ORDERED
        self.crowded = crowded

    def slots(self, parity: int) -> Iterable[memoryview]:
        """Each rank's room for data, in rank order, in collectives of this parity."""
        memory, start = memoryview(self._memory), _data_at(self._size)
        for rank in range(self._size):
            at = start + (2 * rank + parity) * SLOT_BYTES
            yield memory[at : at + SLOT_BYTES]

    def enter(self, call: Call, sequence: int, _: int) -> None:
        """Arrive: from here on the others may rely on this rank."""
        word = (sequence & _NUMBERS) << _NUMBER_AT | call.signature
        self._words[self._own[sequence & 1]] = word
        self._here = word.to_bytes(8, sys.byteorder) * self._size

    def entered(self, sequence: int) -> bool:
        """Whether this rank has arrived at that collective."""
        return self._words[self._own[sequence & 1]] >> _NUMBER_AT == sequence & _NUMBERS

    def agree(self, call: Call, sequence: int, timeout: float | None) -> bool:
        """Wait until all are in the call. False if they are in different ones; raise `CommError` if one gave up."""
        start, stop = self._spans[sequence & 1]
        memory = self._memory
        here = self._here
        crowded = self.crowded
        for _ in self._looks:
            if memory[start:stop] == here:
                if memory[start:stop] == here:  # the second reading
                    return True
                break
            if crowded:
                os.sched_yield()

        def between() -> None:
            self._turn()
            self.look(call, sequence)

        while True:
            poll = _Poll(self, start, stop, here, sequence)
            until(poll, call.about, timeout, between)
            if poll.verdict == "differ":
                return False
            if poll.verdict == "left":
                self.look(call, sequence)
            elif self._verdict(sequence) == "go":  # the second reading
                return True

    def look(self, call: Call, sequence: int) -> None:
        """Raise `CommError` if a rank has given up this call, or the one before after this rank; give it up as well."""
        for number in (sequence, sequence - 1):
            for rank, word in enumerate(self._row(number)):
                if word & 3 == _LEFT and word >> _NUMBER_AT == number & _NUMBERS:
                    self.mark_left(sequence)
                    group = call.group
                    text = dict(group.log).get(number, call.text)
                    group.abandoned = group.abandoned or f"rank {rank} gave up {text}"
                    lost = gone(group)
                    if lost:
                        raise died(group, call.operation, lost, f"in {text}, {place()}")
                    raise CommError(
                        f"{group.who(call.operation)}: rank {rank} gave up while the others were in {text}: it was "
                        "interrupted, or its time was over. Run comm.renew() on every rank before the next collective."
                    )

    def leave(self, call: Call, sequence: int, _: int) -> bool:
        """Give up. True if that is too late: all are in the call, and this rank must go through with it.

        May be repeated when it was interrupted itself.
        """
        at, words = self._own[sequence & 1], self._words
        if words[at] & 3 == _HERE:
            words[at] = words[at] | _LEAVING
        if words[at] & 3 == _LEAVING:
            if self._leaving[0] != sequence:
                self._leaving = sequence, time.perf_counter()
            while (rest := self._leaving[1] + PAUSE_S - time.perf_counter()) > 0:  # repeated: only what is left of it
                time.sleep(rest)
            if self._verdict(sequence) not in ("leaving", "go"):
                self.mark_left(sequence)
            else:
                words[at] = words[at] & ~3 | _STAYED
        while words[at] & 3 == _STAYED:  # no longer than another rank, which is LEAVING, needs to make up its mind
            verdict = self._verdict(sequence)
            if verdict == "go" == self._verdict(sequence):
                return True
            if verdict == "left":
                self.mark_left(sequence)
            else:
                self._turn()
                time.sleep(50e-6)
        return False

    def mark_left(self, sequence: int) -> None:
        """Say for good that this rank will not take part, if it has arrived."""
        if not self.entered(sequence):
            return
        at = self._own[sequence & 1]
        self._words[at] = self._words[at] | _LEFT

    def drop(self) -> bool:
        """Let go of the memory."""
        self._words = memoryview(bytearray(16 * self._size)).cast("Q")
        self._memory = mmap.mmap(-1, 1)
        return True

    def free(self) -> None:
        """The same."""
        self.drop()

    def _row(self, sequence: int) -> list[int]:
        first = (sequence & 1) * self._size
        return self._words[first : first + self._size].tolist()

    def _verdict(self, sequence: int) -> str:
        """What the words of a collective say together: wait, left, leaving, differ or go."""
        row = self._row(sequence)
        number, phases = sequence & _NUMBERS, [word & 3 for word in row]
        there = [word >> _NUMBER_AT == number for word in row]
        if any(phase == _LEFT for phase, is_there in zip(phases, there, strict=True) if is_there):
            return "left"
        if not all(there):
            return "wait"
        if any(word >> 2 != row[0] >> 2 for word in row):
            return "differ"
        return "leaving" if _LEAVING in phases else "go"


class _Poll:
    """Looks at a row of words; true once something is decided."""

    def __init__(self, board: Board, start: int, stop: int, here: bytes, sequence: int) -> None:
        self._board, self._start, self._stop, self._here, self._sequence = board, start, stop, here, sequence
        self._seen = b""
        self._looks = 0
        self.verdict = "wait"

    def __call__(self) -> bool:
        board = self._board
        row = board._memory[self._start : self._stop]
        if row == self._here:
            self.verdict = "go"
            return True
        self._looks += 1
        if self._looks % _EVERY == 0:
            board._turn()
        if row == self._seen:
            return False
        self._seen = row
        self.verdict = board._verdict(self._sequence)
        return self.verdict not in ("wait", "leaving")


def _data_at(size: int) -> int:
    return -(-(_WORDS_AT + 16 * size) // 4096) * 4096


def length(size: int) -> int:
    """Bytes of memory for a board of so many ranks."""
    return _data_at(size) + 2 * size * SLOT_BYTES
