"""Plain mpi4py's messages of pickled objects: how large they can be, and what follows for the verdict."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.cluster.deadlock import Seen
from labkit.comm.mpi import MPI  # mpi4py's own import leaves shared memory where mpiexec did not start the process
from labkit.comm.watched_calls import Call
from labkit.comm.watched_groups import Group
from labkit.comm.watched_sizes import MOST, pickled
from labkit.comm.watched_table import Entry
from labkit.telemetry.states import Wait
from tests.unit.states import NOW, judge, stuck, waiting

PAIR = (0, 1)
SENDRECV = Call(Entry(MPI.Comm, "sendrecv", "both", "call"), MPI.Comm.sendrecv)


class Own:
    """A class of the program's own: whatever it pickles to."""


def exchange(me: int, sent: Any, recvtag: int, recvbuf: Any = None) -> Wait:
    """What rank `me` of two waits for in ``sendrecv(sent, other, 0, recvbuf, other, recvtag)``."""
    other = 1 - me
    kept = SENDRECV.keep(None, sent, other, 0, recvbuf, other, recvtag)
    return SENDRECV.wait(Group("MPI.COMM_WORLD", me, PAIR), kept, None, NOW - 1.2)


def half_matched(sent: Any, recvbuf: Any = None) -> dict[int, Seen]:
    """Rank 1 receives what rank 0 sends, rank 0 waits for another tag than rank 1's."""
    return {0: waiting(exchange(0, sent, 7, recvbuf)), 1: waiting(exchange(1, bytes(10**7), 0))}


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text() | st.binary(),
    lambda inside: st.lists(inside) | st.dictionaries(st.text(), inside) | st.tuples(inside, inside),
)


@given(plain)
def test_a_pickled_object_is_never_larger_than_told(value: Any) -> None:
    told = pickled(value)
    assert told is not None
    assert told[2] >= len(pickle.dumps(value))


@pytest.mark.parametrize(
    "value",
    [
        np.ones((100, 3), "f4")[::2],
        np.float64(2),
        np.array(["a", "bcd"]),
        np.zeros(()),
        torch.ones(1000)[:1],
        torch.ones(4, requires_grad=True),
        [10**1000, "\udc80\U0001f600" * 9, bytearray(99), {1, 2}, frozenset({3})],
    ],
    ids=lambda value: type(value).__name__,
)
def test_arrays_and_tensors_have_a_size(value: Any) -> None:
    told = pickled({"value": value})
    assert told is not None
    assert len(pickle.dumps({"value": value})) <= told[2] < 40_000


def test_what_may_pickle_to_anything_has_none() -> None:
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    marked = torch.ones(1)
    marked.note = "more than a tensor"  # type: ignore[attr-defined]
    for value in (Own(), [Own()], np.array([Own()]), np.zeros(1, "i4,f4"), marked, [0] * MOST, cyclic, int):
        assert pickled(value) is None


def test_a_half_matched_exchange_of_objects_is_proven_as_soon_as_one_of_buffers() -> None:
    for sent in ("a", {"loss": [0.5, np.ones(9)]}):
        assert stuck(half_matched(sent)) == (0, 1)


def test_an_exchange_whose_object_may_still_be_on_its_way_is_none() -> None:
    for sent in (Own(), np.ones(10**7, "i1"), np.ones((10**6, 2), "f8")[::2]):
        assert judge(half_matched(sent)) is None


def test_the_buffer_for_what_comes_says_nothing_about_what_goes() -> None:
    assert judge(half_matched(Own(), recvbuf=bytearray(8))) is None
