"""Messages between two ranks: what is sent arrives, and what does not fit is an error that names both sides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from labkit import comm
from tests.mpi.cases.check_collectives import DTYPES, LAYOUTS, equal, part


def needs(ranks: int) -> None:
    comm.world()
    if comm.size < ranks:
        pytest.skip(f"needs {ranks} ranks")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_goes_round_the_ring(dtype: torch.dtype, layout: str) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x, y = part(comm.rank, dtype, layout), torch.zeros_like(part(0, dtype, layout))
    message = comm.sendrecv(x, right, y, left, sendtag=5, recvtag=5)
    assert equal(y, part(left, dtype, layout))
    assert message == (left, 5, x.numel(), x.numel() * x.element_size(), str(dtype).removeprefix("torch."))


def test_the_document_s_first_example() -> None:
    needs(2)
    if comm.rank == 0:
        comm.send(torch.tensor([1.0, -1.0]), dst=1)
    elif comm.rank == 1:
        x = torch.zeros(2)
        comm.recv(x, src=0)
        assert x.tolist() == [1, -1]


def test_numpy_and_torch_understand_each_other() -> None:
    needs(2)
    if comm.rank == 0:
        comm.send(np.arange(6, dtype="float32").reshape(2, 3).T, 1)
    elif comm.rank == 1:
        x = torch.zeros(3, 2)
        comm.recv(x, 0)
        assert x.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_read_only_array_can_be_sent_but_not_received_into() -> None:
    x = np.ones(2)
    x.flags.writeable = False
    with pytest.raises(comm.ArgumentError, match="read-only"):
        comm.recv(x, 0)
    y = np.zeros(2)
    comm.sendrecv(x, comm.rank, y, comm.rank)
    assert y.tolist() == [1, 1]


def test_many_messages_in_flight_find_their_tags() -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    targets = [torch.zeros(tag % 50) for tag in range(300)]
    receives = [comm.irecv(x, left, tag) for tag, x in enumerate(targets)]
    sends = [comm.isend(torch.full((tag % 50,), float(tag)), right, tag) for tag in reversed(range(300))]
    for receive in reversed(receives):
        receive.wait()
    for tag, x in enumerate(targets):
        assert x.tolist() == [tag] * (tag % 50)
    for request in sends:
        assert request.wait() is None
        assert request.done
    assert not comm.world().in_flight


def test_sends_that_nobody_waits_for_keep_their_memory_and_are_forgotten() -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.renew()
    for number in range(500):
        comm.isend(torch.full((10,), float(number)), right)
        x = torch.zeros(10)
        comm.recv(x, left)
        assert x.tolist() == [number] * 10
    assert len(comm.world().in_flight) <= 130


def test_any_source_and_any_tag_tell_who_it_was() -> None:
    x = torch.zeros(1)
    if comm.rank == 0:
        seen = set()
        for _ in range(1, comm.size):
            message = comm.recv(x)
            assert message.tag == 10 + message.src == x.item()
            seen.add(message.src)
        assert seen == set(range(1, comm.size))
    else:
        comm.send(torch.tensor([10.0 + comm.rank]), 0, 10 + comm.rank)


def test_messages_of_one_sender_and_tag_stay_in_order() -> None:
    sends = [comm.isend(torch.tensor([number]), comm.rank, 3) for number in range(100)]
    x = torch.zeros(1, dtype=torch.int64)
    for number in range(100):
        comm.recv(x, comm.rank, 3 if number % 2 else None)
        assert x.item() == number
    for request in sends:
        request.wait()


def test_probe_tells_what_is_coming_without_taking_it() -> None:
    request = comm.isend(torch.zeros(3, 4, dtype=torch.bfloat16), comm.rank, 9)
    earlier = comm.isend(torch.zeros(1), comm.rank, 8)
    for found in (comm.probe(tag=9), comm.probe(comm.rank, 9)):
        assert found == (comm.rank, 9, 12, 24, "bfloat16")
    x = torch.ones(found.count, dtype=getattr(torch, found.dtype))
    comm.recv(x, found.src, found.tag)
    assert not x.any()
    comm.recv(torch.zeros(1), tag=8)
    request.wait()
    earlier.wait()


@pytest.mark.parametrize("length", [0, 2, 4, 1_000_000])
@pytest.mark.parametrize("tag", [0, None])
def test_a_message_of_another_length_is_an_error_with_both_sizes_and_is_not_lost(length: int, tag: int | None) -> None:
    needs(2)
    if comm.rank == 0:
        comm.send(torch.ones(length), 1)
    elif comm.rank == 1:
        with pytest.raises(comm.MismatchError, match=rf"holds 12 bytes .* rank 0 sent {4 * length} bytes"):
            comm.recv(torch.ones(3), 0, tag)
        fits = torch.zeros(length)
        comm.recv(fits, 0, tag)
        assert fits.sum() == length
    check_that_all_is_well()


@pytest.mark.parametrize("tag", [0, None])
def test_a_message_of_another_dtype_is_an_error_and_can_still_be_received(tag: int | None) -> None:
    needs(2)
    if comm.rank == 0:
        comm.send(torch.ones(3), 1)
    elif comm.rank == 1:
        with pytest.raises(comm.MismatchError, match="expects int32, but rank 0 sent float32 × 3"):
            comm.recv(torch.ones(3, dtype=torch.int32), 0, tag)
        comm.recv(torch.ones(3), 0, tag)
    check_that_all_is_well()


def test_irecv_reports_another_dtype_each_time_it_is_asked() -> None:
    request = comm.irecv(torch.ones(2, dtype=torch.int64))
    comm.isend(torch.ones(2, dtype=torch.float64), comm.rank).wait()
    for ask in (request.wait, request.wait, request.test):
        with pytest.raises(comm.MismatchError, match="expects int64"):
            ask()
    comm.recv(torch.ones(2, dtype=torch.float64), comm.rank)


def test_receives_are_matched_in_the_order_they_were_made_and_progress_in_any_wait() -> None:
    needs(2)
    big = 300_000
    if comm.rank == 0:
        targets = [torch.zeros(big) for _ in range(4)]
        receives = [comm.irecv(targets[0], 1), comm.irecv(targets[1]), comm.irecv(targets[2], 1, 0)]
        receives.append(comm.irecv(targets[3], tag=0))
        comm.barrier()  # rank 1 comes only after its sends have been received
        for number in (3, 1, 0, 2):
            receives[number].wait()
            assert (targets[number] == number).all()
    else:
        if comm.rank == 1:
            for number in range(4):
                comm.send(torch.full((big,), float(number)), 0)
        comm.barrier()


def test_objects_and_tensors_are_told_apart() -> None:
    comm.isend(torch.ones(2), comm.rank).wait()
    with pytest.raises(comm.MismatchError, match=r"Receive it with recv\(\)"):
        comm.recv_object(comm.rank)
    comm.recv(torch.ones(2), comm.rank)
    comm.send_object({"a": 1}, comm.rank)
    with pytest.raises(comm.MismatchError, match=r"recv_object\(\)"):
        comm.recv(torch.ones(2), comm.rank, 0)
    assert comm.recv_object() == {"a": 1}


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: comm.send(torch.ones(1), 77), "dst=77 is no rank"),
        (lambda: comm.send(torch.ones(1), 0, -1), "tag=-1"),
        (lambda: comm.recv(torch.ones(1), 0, 10**12), "tag=1000000000000"),
        (lambda: comm.isend("text", 0), "_object functions"),
        (lambda: comm.recv(torch.ones(1), "0"), "src='0' is no rank"),
    ],
)
def test_wrong_arguments_are_refused(call: Any, text: str) -> None:
    with pytest.raises(comm.ArgumentError, match=text):
        call()


def check_that_all_is_well() -> None:
    x = torch.ones(3)
    comm.all_reduce(x)
    assert x.tolist() == [comm.size] * 3
