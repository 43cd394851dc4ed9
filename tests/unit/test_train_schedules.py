"""Pipeline schedules never lock, keep as many activations as they say, and leave the bubble that theory gives."""

from __future__ import annotations

import itertools

import pytest

from labkit.train.schedules import SCHEDULES, Turn, bubble_share, gpipe, one_forward_one_backward, play

SIZES = list(itertools.product(range(1, 7), range(1, 10)))


def kept(turns: list[Turn]) -> int:
    now = most = 0
    for turn in turns:
        now += 1 if turn.forward else -1
        most = max(most, now)
    return most


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_stage_takes_every_micro_batch_forward_and_then_back(name: str) -> None:
    for stages, micro in SIZES:
        for stage in range(stages):
            turns = SCHEDULES[name](stage, stages, micro)
            assert sorted(turns) == sorted(Turn(way, number) for way in (True, False) for number in range(micro))
            for number in range(micro):
                assert turns.index(Turn(True, number)) < turns.index(Turn(False, number))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("backward_s", [1.0, 2.0])
def test_stages_never_lock_and_are_idle_as_long_as_theory_says(name: str, backward_s: float) -> None:
    for stages, micro in SIZES:
        begun = play(SCHEDULES[name], stages, micro, 1.0, backward_s)
        assert [[turn for turn, _ in each] for each in begun] == [
            SCHEDULES[name](stage, stages, micro) for stage in range(stages)
        ]
        length = max(start + (1.0 if turn.forward else backward_s) for each in begun for turn, start in each)
        busy = micro * (1.0 + backward_s)
        assert 1 - busy / length == pytest.approx(bubble_share(stages, micro))


def test_one_forward_one_backward_keeps_few_activations_and_gpipe_all() -> None:
    for stages, micro in SIZES:
        for stage in range(stages):
            assert kept(gpipe(stage, stages, micro)) == micro
            assert kept(one_forward_one_backward(stage, stages, micro)) == min(stages - stage, micro)


def test_a_schedule_that_locks_is_found() -> None:
    def backward_of_the_next_first(stage: int, stages: int, micro_batches: int) -> list[Turn]:
        turns = gpipe(stage, stages, micro_batches)
        return turns if stage else turns[:1] + turns[-1:] + turns[1:-1]

    assert play(gpipe, 2, 2)
    with pytest.raises(ValueError, match="each waits for a turn"):
        play(backward_of_the_next_first, 2, 2)
