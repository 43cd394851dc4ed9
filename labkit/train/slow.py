"""Slow ranks, made on purpose, to see what they cost each training method.

In synchronous training all ranks wait for the slowest; a master serves whoever comes. Three kinds:

- a factor: a step's computing takes so many times as long, as on a slower machine;
- `Pause`: the rank stands still for some time, once or again and again;
- `Load`: other processes compute on the rank's core, as on a machine that is shared.

The first two sleep, and so take nothing from the other ranks of the same machine.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType

from .busy import Busy

__all__ = ["Factor", "Load", "Pause", "Slowed", "Slowness", "in_words", "of", "parse", "plan"]


@dataclass(frozen=True)
class Factor:
    """A step's computing takes `times` times as long; a number alone means the same."""

    times: float

    def __post_init__(self) -> None:
        if not (_is_number(self.times) and self.times >= 1):
            raise ValueError(f"a rank can be slowed down by a factor of at least 1, not {self.times!r}")

    def extra_s(self, step: int, compute_s: float) -> float:
        """Return the seconds to add to the step, counted from 0, whose computing took `compute_s`."""
        return (self.times - 1) * compute_s

    def __str__(self) -> str:
        return f"{self.times:g} times"


@dataclass(frozen=True)
class Pause:
    """The rank stands still for `seconds` after the computing of step number `at`, or of `every` so many steps.

    Steps are those that this rank has made in the run, counted from 0 for `at`; ``every=50`` comes after 50, 100, …
    """

    seconds: float
    at: int | None = None
    every: int | None = None

    def __post_init__(self) -> None:
        if not (_is_number(self.seconds) and self.seconds >= 0):
            raise ValueError(f"a pause takes a number of seconds of at least 0, not {self.seconds!r}")
        if (self.at is None) == (self.every is None):
            raise ValueError("a pause takes either at=STEP or every=STEPS")
        for name, least in (("at", 0), ("every", 1)):
            value = getattr(self, name)
            if value is not None and not (_is_whole(value) and value >= least):
                raise ValueError(f"a pause takes {name}= a whole number of at least {least}, not {value!r}")

    def extra_s(self, step: int, compute_s: float) -> float:
        """Return the seconds to add to the step, counted from 0."""
        due = step == self.at if self.every is None else (step + 1) % self.every == 0
        return self.seconds if due else 0.0

    def __str__(self) -> str:
        when = f"at step {self.at}" if self.every is None else f"every {self.every} steps"
        return f"pauses {self.seconds:g} s {when}"


@dataclass(frozen=True)
class Load:
    """So many `processes` compute on each of the rank's cores (as many as torch has threads) while it trains."""

    processes: int = 1

    def __post_init__(self) -> None:
        if not (_is_whole(self.processes) and self.processes >= 1):
            raise ValueError(f"a load is a whole number of processes of at least 1, not {self.processes!r}")

    def extra_s(self, step: int, compute_s: float) -> float:
        """Return 0: the step takes longer by itself."""
        return 0.0

    def __str__(self) -> str:
        return f"{self.processes} busy {'process' if self.processes == 1 else 'processes'} on its core"


Slowness = Factor | Pause | Load
Setting = Mapping[int, float | Slowness]
"""Rank → how it is slow: a factor, `Pause` or `Load`."""


class Slowed:
    """Makes one rank slow: each step's computing stands in its ``with`` block; `close` at the end of the run.

    Parameters
    ----------
    slowness
        In which way; None: not at all.
    finish
        Waits until the device has computed what it was given; default: nothing to wait for, as on the CPU.
    spent
        Seconds that this rank has spent in communication so far, which is no computing; default: none.
    clock, sleep
        What tells seconds, and what lets them pass.

    Attributes
    ----------
    step
        Steps made.
    added_s
        Seconds slept so far.
    """

    def __init__(
        self,
        slowness: Slowness | None = None,
        *,
        finish: Callable[[], object] | None = None,
        spent: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.slowness = slowness
        self.step = 0
        self.added_s = 0.0
        self._finish, self._spent, self._clock, self._sleep = finish, spent, clock, sleep
        self._busy: Busy | None = None
        self._began = self._spent_before = 0.0

    def __enter__(self) -> Slowed:
        if self.slowness is not None:
            if isinstance(self.slowness, Load) and self._busy is None:
                self._busy = Busy(self.slowness.processes)
            self._spent_before = self._spent()
            self._began = self._clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self.slowness is not None and error is None:
            if self._finish is not None:
                self._finish()
            self.after(self._clock() - self._began - (self._spent() - self._spent_before))

    def after(self, compute_s: float) -> None:
        """Make the step longer whose computing took `compute_s` seconds; done by itself at the end of the block."""
        extra_s = self.slowness.extra_s(self.step, compute_s) if self.slowness is not None else 0.0
        self.step += 1
        if extra_s > 0:
            self._sleep(extra_s)
            self.added_s += extra_s

    def close(self) -> None:
        """End what keeps the rank's core busy."""
        if self._busy is not None:
            self._busy.close()
            self._busy = None


def of(
    rank: int,
    setting: Setting | None,
    size: int | None = None,
    *,
    finish: Callable[[], object] | None = None,
    spent: Callable[[], float] = lambda: 0.0,
) -> Slowed:
    """Return what makes `rank` (of `size`) as slow as `setting` says; see `Slowed` for the rest.

    Raises
    ------
    ValueError
        For a setting that makes no sense.
    """
    return Slowed(plan(setting, size).get(rank), finish=finish, spent=spent)


def plan(setting: Setting | None, size: int | None = None) -> dict[int, Slowness]:
    """Return each slow rank's slowness.

    Raises
    ------
    ValueError
        For what is no rank (of `size`, if that is given), or makes no sense.
    """
    if not isinstance(setting or {}, Mapping):
        raise ValueError(f"slow takes a rank and how slow it is, as in slow={{2: 3.0}}, not {setting!r}")
    found: dict[int, Slowness] = {}
    for rank, value in (setting or {}).items():
        if not (_is_whole(rank) and rank >= 0 and (size is None or rank < size)):
            there = "" if size is None else f": there are {size}, from 0"
            raise ValueError(f"slow has no rank {rank!r}{there}")
        found[rank] = value if isinstance(value, Factor | Pause | Load) else Factor(value)
    return found


def in_words(setting: Setting | None) -> str | None:
    """Return the setting in words, for the history; None: no rank is slowed down.

    >>> in_words({2: 3.0, 1: Pause(0.5, at=50)})
    'rank 1: pauses 0.5 s at step 50, rank 2: 3 times'
    """
    return ", ".join(f"rank {rank}: {how}" for rank, how in sorted(plan(setting).items())) or None


def parse(text: str) -> tuple[int, Slowness]:
    """Read ``RANK:HOW`` from a command line.

    >>> parse("2:3.0")
    (2, Factor(times=3.0))
    >>> parse("1:pause@50=0.5")  # at step 50; pause/50: every 50 steps
    (1, Pause(seconds=0.5, at=50, every=None))
    >>> parse("1:load=2")
    (1, Load(processes=2))

    Raises
    ------
    ValueError
        When it is written in another way.
    """
    match = re.fullmatch(r"(\d+):(?:load=(\d+)|pause([@/])(\d+)=([^=]+)|([^=]+))", text)
    if match is None:
        forms = "RANK:FACTOR, RANK:pause@STEP=SECONDS, RANK:pause/STEPS=SECONDS or RANK:load=PROCESSES"
        raise ValueError(f"{text!r} is not {forms}")
    rank, processes, when, steps, seconds, times = match.groups()
    try:
        if processes is not None:
            return int(rank), Load(int(processes))
        if when is not None:
            return int(rank), Pause(_number(seconds), **{"at" if when == "@" else "every": int(steps)})
        return int(rank), Factor(_number(times))
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None


def _number(text: str) -> float:
    """Read a number; what is none is refused later, together with infinities."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
