"""Each rank has one role, and those who talk to each other agree on it."""

from __future__ import annotations

import pytest

from labkit.train import TrainError
from labkit.train.roles import assign


@pytest.mark.parametrize(
    ("size", "masters", "each"), [(2, 1, 1), (4, 1, 1), (7, 1, 2), (5, 2, 1), (8, 2, 1), (11, 3, 1), (15, 2, 3)]
)
def test_masters_and_workers_agree_on_who_talks_to_whom(size: int, masters: int, each: int) -> None:
    roles = [assign("downpour", rank, size, masters, each) for rank in range(size)]
    above = 1 + (masters if masters > 1 else 0)
    assert sum(role.worker < 0 for role in roles) == above
    assert [rank for rank, role in enumerate(roles) if role.top] == [0]
    for rank, role in enumerate(roles):
        assert all(roles[child].master == rank and roles[child].leads for child in role.children)
        if role.leads and not role.top:
            assert rank in roles[role.master].children
        assert role.workers == (size - above) // each
    # The ranks that compute are numbered without a gap, and a worker's come one after the other.
    assert [role.place for role in roles if role.worker >= 0] == list(range(size - above))
    assert [role.worker for role in roles if role.worker >= 0] == [place // each for place in range(size - above)]
    bottom = [len(role.children) for role in roles if role.worker < 0 and not (role.top and masters > 1)]
    assert sum(bottom) == roles[0].workers and max(bottom) - min(bottom) <= 1


def test_too_few_ranks_are_refused_with_the_number_that_it_takes() -> None:
    with pytest.raises(TrainError, match=r"easgd needs at least 2 ranks \(1 to be master\), and there is 1: start"):
        assign("easgd", 0, 1)
    with pytest.raises(TrainError, match=r"downpour needs at least 5 ranks \(3 to be masters\), and there are 4"):
        assign("downpour", 3, 4, masters=2)
    with pytest.raises(TrainError, match=r"3 of the 4 ranks compute, .* ranks_per_worker=2: start 3 ranks"):
        assign("downpour", 1, 4, ranks_per_worker=2)
