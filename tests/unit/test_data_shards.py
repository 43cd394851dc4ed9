"""Every sample once an epoch, equal steps on every rank, the same global batches for any number of ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.data import DataError, Shard, share

samples, ranks, batches = st.integers(0, 400), st.integers(1, 9), st.integers(1, 33)


Steps = list[tuple[list[int], int]]


def epoch_of(n: int, size: int, batch: int, seed: int = 0, epoch: int = 0) -> list[Steps]:
    """For each rank its steps, each as (indices, total)."""
    return [
        [(part.indices.tolist(), part.total) for part in Shard(n, rank, size, batch, seed).epoch(epoch)]
        for rank in range(size)
    ]


@given(samples, ranks, batches)
def test_each_sample_comes_exactly_once_an_epoch(n: int, size: int, batch: int) -> None:
    seen = [index for steps in epoch_of(n, size, batch) for indices, _ in steps for index in indices]
    assert sorted(seen) == list(range(n))


@given(samples, ranks, batches)
def test_every_rank_makes_the_announced_number_of_steps(n: int, size: int, batch: int) -> None:
    announced = {Shard(n, rank, size, batch).steps for rank in range(size)}
    made = {len(steps) for steps in epoch_of(n, size, batch)}
    assert announced == made and len(made) == 1


@given(samples, ranks, batches, st.integers(0, 2**40), st.integers(0, 50))
def test_ranks_together_see_step_by_step_what_one_rank_sees(
    n: int, size: int, batch: int, seed: int, epoch: int
) -> None:
    [alone] = epoch_of(n, 1, size * batch, seed, epoch)
    together = epoch_of(n, size, batch, seed, epoch)
    for step, (indices, total) in enumerate(alone):
        parts = [steps[step] for steps in together]
        assert [index for part, _ in parts for index in part] == indices
        assert {part_total for _, part_total in parts} == {total}
        assert max(len(part) for part, _ in parts) - min(len(part) for part, _ in parts) <= 1
        assert all(len(part) <= batch for part, _ in parts)


def test_epochs_and_seeds_shuffle_differently_and_repeatably() -> None:
    orders = {(seed, epoch): tuple(epoch_of(100, 1, 100, seed, epoch)[0][0][0]) for seed in (0, 1) for epoch in (0, 1)}
    assert len(set(orders.values())) == 4
    assert orders[1, 1] == tuple(epoch_of(100, 1, 100, 1, 1)[0][0][0])


def test_shuffling_leaves_the_callers_random_numbers_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    list(Shard(10, 0, 1, 2).epoch(0))
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((-1, 0, 1, 1), "-1 samples"),
        ((10, 4, 4, 1), "no rank 4 among 4 ranks"),
        ((10, 0, 0, 1), "among 0 ranks"),
        ((10, 0, 1, 0), "batch size must be at least 1"),
        ((10, 0, 1, 1, -5), "seed must be at least 0"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(arguments: tuple[int, ...], words: str) -> None:
    with pytest.raises(DataError, match=words):
        Shard(*arguments)


@given(samples, ranks)
def test_shares_are_contiguous_and_as_even_as_possible(n: int, size: int) -> None:
    shares = [share(n, rank, size) for rank in range(size)]
    assert shares[0][0] == 0 and shares[-1][1] == n
    assert all(shares[i][1] == shares[i + 1][0] for i in range(size - 1))
    lengths = [last - first for first, last in shares]
    assert max(lengths) - min(lengths) <= 1
