"""How slow a rank is made, on a clock of the test's own, and how that is written."""

from __future__ import annotations

import time
from typing import Any

import pytest

from labkit.train import Load, Pause, SettingError, Settings, slow
from labkit.train.busy import own_cores
from labkit.train.options import parse
from labkit.train.slow import Factor, Slowed


class Clock:
    """Time passes only when somebody computes, communicates or sleeps."""

    def __init__(self) -> None:
        self.now = self.spent = 0.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)

    def slowed(self, how: slow.Slowness | None, **options: Any) -> Slowed:
        return Slowed(how, clock=lambda: self.now, sleep=self.sleep, spent=lambda: self.spent, **options)


def steps(clock: Clock, slowed: Slowed, *computing: float) -> list[float]:
    """How long each step took in all, whose computing took so long."""
    taken = []
    for seconds in computing:
        began = clock.now
        with slowed:
            clock.now += seconds
        taken.append(clock.now - began)
    return taken


def test_a_factor_makes_each_steps_computing_so_many_times_as_long() -> None:
    clock = Clock()
    slowed = clock.slowed(Factor(3.0))
    assert steps(clock, slowed, 1.0, 0.5) == [3.0, 1.5]
    assert (slowed.step, slowed.added_s) == (2, 3.0)


def test_time_in_communication_is_no_computing() -> None:
    clock = Clock()
    with clock.slowed(Factor(2.0)):
        clock.now += 5.0
        clock.spent += 4.0
    assert clock.slept == [1.0]


def test_what_the_device_still_computes_counts() -> None:
    clock = Clock()
    with clock.slowed(Factor(2.0), finish=lambda: setattr(clock, "now", clock.now + 3.0)):
        clock.now += 1.0
    assert clock.slept == [4.0]


def test_a_pause_comes_once_or_again_and_again() -> None:
    clock = Clock()
    assert steps(clock, clock.slowed(Pause(9.0, at=2)), *[1.0] * 5) == [1, 1, 10, 1, 1]
    assert steps(clock, clock.slowed(Pause(9.0, every=2)), *[1.0] * 5) == [1, 10, 1, 10, 1]


def test_others_are_not_slowed_nor_is_a_step_that_failed() -> None:
    clock = Clock()
    setting = {2: 3.0}
    assert slow.of(2, setting).slowness == Factor(3.0)
    assert slow.of(1, setting).slowness is None and slow.of(0, None).slowness is None
    assert steps(clock, clock.slowed(None), 1.0) == [1.0]
    with pytest.raises(KeyboardInterrupt), clock.slowed(Factor(3.0)):
        raise KeyboardInterrupt
    assert clock.slept == []


def test_on_the_real_clock_it_takes_at_least_so_long() -> None:
    began = time.perf_counter()
    with Slowed(Factor(4.0)) as slowed:
        computed = time.perf_counter()
        while time.perf_counter() - computed < 0.01:
            pass
    assert slowed.added_s >= 0.03 and time.perf_counter() - began >= 0.04


@pytest.mark.parametrize(
    ("text", "found", "words"),
    [
        ("2:3.0", (2, Factor(3.0)), "rank 2: 3 times"),
        ("0:1e1", (0, Factor(10.0)), "rank 0: 10 times"),
        ("1:pause@50=0.5", (1, Pause(0.5, at=50)), "rank 1: pauses 0.5 s at step 50"),
        ("1:pause/50=0.5", (1, Pause(0.5, every=50)), "rank 1: pauses 0.5 s every 50 steps"),
        ("12:load=1", (12, Load()), "rank 12: 1 busy process on its core"),
        ("12:load=3", (12, Load(3)), "rank 12: 3 busy processes on its core"),
    ],
)
def test_it_is_read_from_a_command_line_and_said_in_words(
    text: str, found: tuple[int, slow.Slowness], words: str
) -> None:
    assert slow.parse(text) == found
    assert slow.in_words(dict([found])) == words
    assert parse(["--slow", text]).slow == dict([found])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("3.0", "'3.0' is not RANK:FACTOR, RANK:pause@STEP=SECONDS"),
        ("-1:2", "'-1:2' is not RANK:FACTOR"),
        ("1:lode=2", "'1:lode=2' is not RANK:FACTOR"),
        ("1:fast", "'1:fast': a rank can be slowed down by a factor of at least 1, not nan"),
        ("1:0.5", "'1:0.5': a rank can be slowed down by a factor of at least 1, not 0.5"),
        ("1:inf", "a factor of at least 1, not inf"),
        ("1:pause@5=-1", "a pause takes a number of seconds of at least 0, not -1"),
        ("1:pause/0=1", "a pause takes every= a whole number of at least 1, not 0"),
        ("1:load=0", "a load is a whole number of processes of at least 1, not 0"),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"^'") as refusal:
        slow.parse(text)
    assert words in str(refusal.value)
    with pytest.raises(SystemExit):
        parse([f"--slow={text}"])
    assert words in capsys.readouterr().err


def test_a_rank_is_slowed_in_one_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["--slow", "1:2", "--slow", "2:load=1"]).slow == {1: Factor(2.0), 2: Load()}
    with pytest.raises(SystemExit):
        parse(["--slow", "1:2", "--slow", "1:load=1"])
    assert "--slow: rank 1 is given more than once" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({0: 0.9}, "factor of at least 1, not 0.9"),
        ({0: "twice"}, "factor of at least 1, not 'twice'"),
        ({-1: 2.0}, "slow has no rank -1"),
        ({"1": 2.0}, "slow has no rank '1'"),
        (3.0, "slow takes a rank and how slow it is, as in slow={2: 3.0}, not 3.0"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(setting: Any, words: str) -> None:
    with pytest.raises(SettingError) as refusal:
        Settings(slow=setting)
    assert words in str(refusal.value)


def test_a_pause_is_either_at_a_step_or_every_so_many() -> None:
    for when in ({}, {"at": 1, "every": 2}):
        with pytest.raises(ValueError, match="either at=STEP or every=STEPS"):
            Pause(1.0, **when)
    with pytest.raises(ValueError, match="slow has no rank 3: there are 3, from 0"):
        slow.plan({3: 2.0}, size=3)


def test_the_ranks_of_a_host_take_its_cores_in_turn() -> None:
    cores = [0, 1, 4, 5]
    assert [own_cores(cores, rank, 1) for rank in range(5)] == [[0], [1], [4], [5], [0]]
    assert [own_cores(cores, rank, 2) for rank in range(3)] == [[0, 1], [4, 5], [0, 1]]
    assert own_cores([3], 2, 4) == [3]
