"""However the samples are shared, each comes exactly once an epoch; and a queue gives back what a dead worker had."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.data import Batch, DataError, Dataset, Feed, Tensors, WorkQueue, from_tensors, share
from labkit.data.files_feed import FilesFeed, Plan, spread

sizes, batches, epochs = st.integers(1, 5), st.integers(1, 13), st.integers(0, 3)
weights = st.lists(st.floats(0.1, 10) | st.integers(1, 9), min_size=1, max_size=5)
unhurried = settings(deadline=None, max_examples=60)
file_sizes = st.lists(st.integers(1, 40), min_size=1, max_size=9)


def numbered(n: int, start: int = 0) -> Tensors:
    """Samples that say which they are: the image as well as the label is the number."""
    numbers = torch.arange(start, start + n)
    return Tensors(numbers.to(torch.float32).unsqueeze(1), numbers)


def dataset(n: int) -> Dataset:
    return Dataset("numbers", numbered(n), numbered(1), tuple(map(str, range(max(n, 1)))), "made up")


def numbers_in(batches: list[Batch]) -> list[int]:
    assert all(torch.equal(images.squeeze(1), labels.to(images.dtype)) for images, labels, _ in batches)
    return [label for batch in batches for label in batch.labels.tolist()]


def check_together(feeds: list[Feed], n: int, epoch: int = 0) -> list[list[Batch]]:
    """Each sample comes once, all ranks make the announced number of steps, and each total is right."""
    by_rank = [list(feed.epoch(epoch)) for feed in feeds]
    assert sorted(number for batches in by_rank for number in numbers_in(batches)) == list(range(n))
    assert {len(batches) for batches in by_rank} == {feed.steps for feed in feeds}
    for step in zip(*by_rank, strict=True):
        assert {batch.total for batch in step} == {sum(len(batch.labels) for batch in step)}
    return by_rank


def files_feeds(samples: list[int], size: int, batch: int, shares: list[float] | None = None) -> list[Feed]:
    """A feed for each rank, of files in memory."""
    starts = [sum(samples[:file]) for file in range(len(samples))]
    plan = Plan(samples, size, batch, shares)

    def load(file: int) -> Tensors:
        return numbered(samples[file], starts[file])

    return [FilesFeed(plan, samples, rank, load, numbered(0)) for rank in range(size)]


@unhurried
@given(st.integers(0, 200), sizes, batches, epochs)
def test_equal_shards_hold_each_sample_once(n: int, size: int, batch: int, epoch: int) -> None:
    check_together([dataset(n).feed(rank, size, batch) for rank in range(size)], n, epoch)


@unhurried
@given(st.integers(0, 200), weights, batches)
def test_weighted_shards_hold_each_sample_once_and_follow_the_weights(n: int, shares: list[float], batch: int) -> None:
    size = len(shares)
    by_rank = check_together([dataset(n).weighted(shares).feed(rank, size, batch) for rank in range(size)], n)
    for step in zip(*by_rank, strict=True):
        for part, weight in zip(step, shares, strict=True):
            assert abs(len(part.labels) - part.total * weight / sum(shares)) < 1 + 1e-6


@unhurried
@given(file_sizes, sizes, batches, epochs)
def test_files_hold_each_sample_once(samples: list[int], size: int, batch: int, epoch: int) -> None:
    check_together(files_feeds(samples, size, batch), sum(samples), epoch)


@unhurried
@given(file_sizes, weights, batches)
def test_files_by_weight_hold_each_sample_once(samples: list[int], shares: list[float], batch: int) -> None:
    check_together(files_feeds(samples, len(shares), batch, shares), sum(samples))


@unhurried
@given(file_sizes, sizes, batches)
def test_all_batches_of_a_rank_but_its_last_are_full(samples: list[int], size: int, batch: int) -> None:
    for feed in files_feeds(samples, size, batch):
        *full, last = [len(b.labels) for b in feed.epoch(0) if len(b.labels)] or [batch]
        assert set(full) <= {batch} and 0 < last <= batch


@unhurried
@given(file_sizes, sizes)
def test_files_are_spread_as_evenly_as_whole_files_allow(samples: list[int], size: int) -> None:
    plan = spread(samples, size)
    assert sorted(file for mine in plan for file in mine) == list(range(len(samples)))
    loads = [sum(samples[file] for file in mine) for mine in plan]
    assert max(loads) - min(loads) <= max(samples)
    assert spread(samples, size) == plan


def test_a_rank_with_twice_the_weight_gets_twice_the_files_and_the_batch() -> None:
    plan = Plan([10] * 12, size=3, batch_size=8, weights=[2, 1, 1])
    assert plan.samples == [60, 30, 30] and plan.batches == [12, 6, 6] and plan.steps == 5


def feed_of(kind: str) -> Feed:
    return dataset(50).feed(1, 2, 4) if kind == "shard" else files_feeds([9, 5, 17, 8, 11], 2, 4)[1]


@pytest.mark.parametrize("kind", ["shard", "files"])
def test_epochs_differ_repeat_exactly_and_can_be_begun_in_the_middle(kind: str) -> None:
    feed = feed_of(kind)
    first, second = list(feed.epoch(0)), list(feed.epoch(1))
    assert numbers_in(first) != numbers_in(second)
    for begin in range(feed.steps + 1):
        rest = list(feed_of(kind).epoch(0, begin))
        assert [batch.labels.tolist() for batch in rest] == [batch.labels.tolist() for batch in first[begin:]]
        assert [batch.total for batch in rest] == [batch.total for batch in first[begin:]]


@pytest.mark.parametrize("kind", ["shard", "files", "queue"])
def test_batches_are_normalised_and_of_the_dtype_asked_for(kind: str) -> None:
    images = torch.arange(60, dtype=torch.uint8).reshape(15, 1, 2, 2)
    whole = from_tensors(images, torch.arange(15) % 3, images[:2], torch.zeros(2, dtype=torch.int64))
    samples = whole.train

    def batches(dtype: torch.dtype | None) -> Iterator[Batch]:
        if kind == "shard":
            return whole.feed(0, 1, 4, dtype=dtype).epoch(0)
        if kind == "queue":
            return whole.queued(4).queue_feed(answers(4), 4, dtype=dtype).epoch(0)
        return FilesFeed(Plan([15], 1, 4), [15], 0, lambda _: samples, samples.take(torch.arange(0)), 0, dtype).epoch(0)

    for asked, got in ((None, torch.float32), (torch.float64, torch.float64), (torch.bfloat16, torch.bfloat16)):
        made = list(batches(asked))
        assert {batch.images.dtype for batch in made} == {got}
        together = torch.cat([batch.images for batch in made]).to(torch.float64)
        assert together.shape == (15, 1, 2, 2)
        assert together.mean().item() == pytest.approx(0, abs=0.01)
        assert together.std(correction=0).item() == pytest.approx(1, abs=0.01)


def answers(pieces: int) -> Callable[[int], int | None]:
    """A master that has one worker."""
    return WorkQueue(pieces).next


@unhurried
@given(st.integers(1, 90), st.integers(1, 20), batches, st.lists(st.integers(0, 4), max_size=60))
def test_a_queue_gives_each_sample_once_whoever_is_quicker(n: int, chunk: int, batch: int, turns: list[int]) -> None:
    whole = dataset(n).queued(chunk)
    queue = whole.work_queue(seed=3)
    feeds = [whole.queue_feed(queue.next, batch, seed=3) for _ in range(5)]
    for epoch in (0, 1):
        going = {worker: feed.epoch(epoch) for worker, feed in enumerate(feeds)}
        made = [batch for worker in turns for batch in [next(going[worker], None)] if batch is not None]
        for rest in going.values():
            made += rest
        assert sorted(numbers_in(made)) == list(range(n)) and queue.next(epoch) is None
        assert all(len(b.labels) == b.total <= min(batch, chunk) for b in made)
    assert not any(feed.together or feed.steps for feed in feeds)


def test_a_queue_hands_out_each_epoch_by_itself() -> None:
    queue = WorkQueue(2)
    handed = [queue.next(epoch) for epoch in (0, 1, 0, 0, 1, 1)]
    assert {handed[0], handed[2]} == {handed[1], handed[4]} == {0, 1} and handed[3] is handed[5] is None


def refused(words: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    with pytest.raises(DataError, match=words):
        call(*arguments, **named)


def test_what_makes_no_sense_is_refused() -> None:
    numbers = dataset(10)
    refused("2 weights were given, and 3 ranks compute", numbers.feed, 0, 3, 4, weights=(1, 2))
    refused("2 weights were given, and 3 ranks compute", numbers.weighted((1, 2)).feed, 0, 3, 4)
    refused("finite number above 0, not 0", numbers.weighted, (1, 0))
    refused("finite number above 0, not nan", numbers.weighted, (1, float("nan")))
    refused("finite number above 0, not '2'", numbers.weighted, "21")
    refused("0 weights were given", numbers.weighted, ())
    refused("handed out by a queue, which needs .* a master", numbers.queued().feed, 0, 1, 4)
    refused(r"by no queue; give queued\(", numbers.work_queue)
    refused(r"by no queue; give queued\(", numbers.queue_feed, answers(1), 4)
    refused("chunk must be a number of samples", numbers.queued, 0)
    refused("batch size must be at least 1", numbers.queued(3).queue_feed, answers(1), 0)
    refused("begun anew", numbers.queued(3).queue_feed(answers(1), 2).epoch, 0, 1)
    refused("at least one piece", WorkQueue, 0)
    refused("seed must be at least 0", WorkQueue, 1, -1)
    refused("batch size must be at least 1", Plan, [3], 1, 0)
    refused("at least one rank", Plan, [3], 0, 1)
    refused("no rank 2 among 2", FilesFeed, Plan([3], 2, 1), [3], 2, lambda file: numbered(3), numbered(0))


def test_ranks_are_told_apart_by_how_they_share() -> None:
    numbers = dataset(10)
    ways = [numbers, numbers.weighted((2, 1)), numbers.weighted((1, 2)), numbers.queued(3), numbers.queued(4)]
    assert len({way.summary for way in ways}) == len(ways)
    assert "weights 2:1" in ways[1].summary and "3 at a time" in ways[3].summary


@unhurried
@given(st.integers(0, 300), weights)
def test_weighted_shares_are_contiguous(n: int, shares: list[float]) -> None:
    parts = [share(n, rank, len(shares), shares) for rank in range(len(shares))]
    assert parts[0][0] == 0 and parts[-1][1] == n
    assert all(parts[i][1] == parts[i + 1][0] for i in range(len(parts) - 1))
    assert [share(n, rank, 4, (3, 3, 3, 3)) for rank in range(4)] == [share(n, rank, 4) for rank in range(4)]


def test_a_split_leaves_the_test_set_for_the_best() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (60, 1, 4, 4), dtype=torch.uint8, generator=generator)
    whole = from_tensors(images[:50], torch.arange(50) % 5, images[50:], torch.arange(10) % 5, name="noise")
    choosing, test = whole.split(validation=13, seed=2)
    assert choosing.summary == "noise: 37 training and 13 validation images, 1×4×4, 5 classes"
    assert "13 of 50 training images held back for validation (seed 2)" in choosing.source
    seen = torch.cat((choosing.train.images, choosing.test.images))
    assert Counter(bytes(i.numpy()) for i in seen) == Counter(bytes(i.numpy()) for i in images[:50])
    assert torch.equal(test.images, whole.test.images) and torch.equal(test.labels, whole.test.labels)
    assert choosing.test.mean == test.mean == choosing.train.mean != whole.train.mean
    share_of, _ = whole.split(validation=0.1, seed=2)
    assert len(share_of.test) == 5 and torch.equal(share_of.test.images, choosing.test.images[:5])
    for wrong in (0, 50, 1.0, 0.001, True):
        refused("validation must be a number of training samples, from 1 to 49", whole.split, wrong)
