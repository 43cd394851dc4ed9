"""Where ranks go on that were interrupted by a death, each at another moment of a step."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

from labkit.data import Shard
from labkit.train import History, Steps, TrainError
from labkit.train.elastic_state import Point, Reached, meeting_point


def at(done: int, tested: int = 0, *, whole: bool = True, **others: bool | str) -> Reached:
    return Reached(done, tested, whole, 40, **others)  # type: ignore[arg-type]


NEW = Reached(0, 0, True, 0)


@pytest.mark.parametrize(
    ("reports", "source", "done"),
    [
        ([at(7), at(7), at(7)], 0, 7),  # nobody has made step 7: all make it again
        ([at(7), at(8), at(7)], 1, 8),  # one has: it stands
        ([at(7), at(8), at(8)], 1, 8),
        ([NEW, at(8), at(8)], 1, 8),  # a healed rank has the lowest number and knows nothing
        ([at(8, whole=False), at(7)], 1, 7),  # interrupted in the middle of an update: its weights are of no step
    ],
)
def test_all_go_on_from_the_weights_with_most_updates(reports: list[Reached], source: int, done: int) -> None:
    point = meeting_point(reports)
    assert (point.source, point.done, point.global_batch) == (source, done, 40)


def test_ranks_that_are_all_new_begin_with_the_first_ones_weights() -> None:
    assert meeting_point([NEW, NEW]) == Point(0, 0, 0, 0, stopped="", closed=False)


def test_an_epoch_that_some_have_not_finished_testing_is_tested_again_and_a_new_rank_has_no_say() -> None:
    assert meeting_point([NEW, at(10, 1), at(10, 0)]).tested == 0
    assert meeting_point([NEW, at(10, 1), at(10, 1)]).tested == 1


def test_who_was_told_to_stop_stops_all_and_the_end_is_reached_together() -> None:
    point = meeting_point([at(5, stopped="by hand", closed=True), at(5)])
    assert point.stopped == "by hand" and not point.closed
    assert meeting_point([at(5, stopped="by hand", closed=True), NEW]).closed


def test_what_cannot_go_on_is_an_error_on_all() -> None:
    with pytest.raises(TrainError, match="in the middle of an update"):
        meeting_point([at(5, whole=False), at(5, whole=False), NEW])
    with pytest.raises(TrainError, match="rank 1 cannot go on: seed was 1, is 2"):
        meeting_point([at(5), at(5, refused="seed was 1, is 2")])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_global_batches_stay_the_same_however_many_ranks_share_them(size: int) -> None:
    shards = [Shard(23, rank, size, batch_size=2, seed=3, global_batch=8) for rank in range(size)]
    whole = [part.indices.tolist() for part in Shard(23, 0, 1, batch_size=8, seed=3).epoch(5)]
    shared = [
        torch.cat([part.indices for part in parts]).tolist()
        for parts in zip(*(s.epoch(5) for s in shards), strict=True)
    ]
    assert shared == whole
    assert {shard.steps for shard in shards} == {3}


def test_the_history_knows_how_many_ranks_trained_at_each_step() -> None:
    history = History(0, 3, steps=Steps(*np.zeros((len(fields(Steps)), 6))))
    history.changed(0, [0, 1, 2], 0.1)
    history.changed(2, [0, 2], 1.0)
    history.changed(5, [0, 1, 2], 2.0)
    assert history.world_sizes().tolist() == [3, 3, 2, 2, 2, 3]
    assert [(change["lost"], change["joined"]) for change in history.changes] == [([], []), ([1], []), ([], [1])]
