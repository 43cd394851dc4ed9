"""In which order a pipeline's stages work on the micro-batches of a step.

With p stages, m micro-batches and equal times, both schedules leave each stage idle for (p − 1)/(m + p − 1) of the
step: the first micro-batch needs p − 1 turns to reach the last stage, and the last one as many to come back. They
differ in how many micro-batches' activations a stage keeps for backward: m, or at most p.

A rank receives and sends in the order of its schedule. Sends don't wait, so no rank waits for one that waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

__all__ = ["SCHEDULES", "Turn", "bubble_share", "gpipe", "one_forward_one_backward", "play"]


class Turn(NamedTuple):
    """One micro-batch on one stage.

    Attributes
    ----------
    forward
        Whether it goes forward; else backward.
    number
        Of the micro-batch, from 0.
    """

    forward: bool
    number: int

    def __str__(self) -> str:
        return f"{'F' if self.forward else 'B'}{self.number}"


def gpipe(stage: int, stages: int, micro_batches: int) -> list[Turn]:
    """All forward, then all backward: Y. Huang et al., "GPipe", 2019, figure 2c. Keeps m micro-batches.

    Examples
    --------
    >>> print(*gpipe(stage=0, stages=3, micro_batches=4))
    F0 F1 F2 F3 B3 B2 B1 B0
    """
    forward = [Turn(True, number) for number in range(micro_batches)]
    return [*forward, *(Turn(False, number) for number in reversed(range(micro_batches)))]


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[Turn]:
    """Back as soon as possible: D. Narayanan et al., 2021, "PipeDream-Flush". Stage s keeps p − s micro-batches.

    "Memory-efficient pipeline-parallel DNN training", figure 2b; called 1F1B since then.

    Examples
    --------
    >>> for stage in range(3):
    ...     print(*one_forward_one_backward(stage, stages=3, micro_batches=4))
    F0 F1 F2 B0 F3 B1 B2 B3
    F0 F1 B0 F2 B1 F3 B2 B3
    F0 B0 F1 B1 F2 B2 F3 B3
    """
    ahead = min(stages - 1 - stage, micro_batches)
    turns = [Turn(True, number) for number in range(ahead)]
    for number in range(micro_batches - ahead):
        turns += [Turn(True, ahead + number), Turn(False, number)]
    return [*turns, *(Turn(False, number) for number in range(micro_batches - ahead, micro_batches))]


Schedule = Callable[[int, int, int], list[Turn]]

SCHEDULES: dict[str, Schedule] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}
"""The turns of a stage, of so many, with so many micro-batches."""


def bubble_share(stages: int, micro_batches: int) -> float:
    """Return the share of a step in which a stage is idle, 0…1, when all stages take equally long.

    (p − 1)/(m + p − 1); Huang et al., section 2.3.

    Examples
    --------
    >>> bubble_share(stages=4, micro_batches=12)
    0.2
    """
    return (stages - 1) / (micro_batches + stages - 1)


def play(
    schedule: Schedule, stages: int, micro_batches: int, forward_s: float = 1.0, backward_s: float = 1.0
) -> list[list[tuple[Turn, float]]]:
    """Return when each stage begins each of its turns, in s, if messages take no time.

    Parameters
    ----------
    schedule
        One of `SCHEDULES`.
    stages, micro_batches
        How many.
    forward_s, backward_s
        Time of a turn, s.

    Raises
    ------
    ValueError
        If the stages would wait for each other for ever.
    """
    turns = [schedule(stage, stages, micro_batches) for stage in range(stages)]
    ended: dict[tuple[int, Turn], float] = {}
    begun: list[list[tuple[Turn, float]]] = [[] for _ in range(stages)]
    free = [0.0] * stages
    while len(ended) < sum(map(len, turns)):
        before = len(ended)
        for stage in range(stages):
            while len(begun[stage]) < len(turns[stage]):
                turn = turns[stage][len(begun[stage])]
                giver = stage - 1 if turn.forward else stage + 1
                if 0 <= giver < stages and (giver, turn) not in ended:
                    break
                start = max(free[stage], ended.get((giver, turn), 0.0))
                begun[stage].append((turn, start))
                free[stage] = ended[stage, turn] = start + (forward_s if turn.forward else backward_s)
        if len(ended) == before:
            raise ValueError("no stage can go on: each waits for a turn that another has not made")
    return begun
