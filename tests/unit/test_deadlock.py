"""The verdict: each rule both ways, on ranks that are made up."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from labkit.cluster.deadlock import Seen, Verdict, describe, stragglers, verdict
from labkit.cluster.seen import duration, rank_list
from labkit.telemetry.states import RankState, Wait
from tests.unit.states import NOW, collective, computing, earlier, judge, over, receive, send, several, stuck, waiting

RAW = "MPI.COMM_WORLD"
PAIR = (0, 1)


def given(seen: dict[int, Seen]) -> Verdict:
    found = judge(seen)
    assert found is not None
    return found


def two_receive(**more: object) -> dict[int, Seen]:
    return {
        0: waiting(receive(0, 1, members=PAIR), 4, **more),  # type: ignore[arg-type]
        1: waiting(receive(1, 0, members=PAIR), 6),
    }


# What it says


def test_the_text_names_operation_line_and_cycle() -> None:
    assert str(given(two_receive())) == (
        "no rank can go on.\n"
        "  rank 0  recv(src=1, tag=0)   cell line 4   waiting 1.2 s\n"
        "  rank 1  recv(src=0, tag=0)   cell line 6   waiting 1.2 s\n"
        "Cycle 0 → 1 → 0. Let one side send first, or use sendrecv()."
    )


def test_a_verdict_has_what_the_picture_needs() -> None:
    found = given({**two_receive(), 2: over(2), 3: computing(3)})
    assert found.kind == "deadlock"
    assert found.ranks == found.cycle == (0, 1)
    assert found.edges == ((0, 1, "recv(src=1, tag=0)"), (1, 0, "recv(src=0, tag=0)"))
    assert found.nodes == {0: "waiting", 1: "waiting", 2: "finished", 3: "computing"}
    assert found.headline == "ranks 0 and 1 cannot go on."
    assert found.lines[2:] == (
        "rank 2  has finished the cell",
        "rank 3  computing            cell line 5   for 12 s",
    )


# A cycle, and what is none


def test_three_ranks_in_a_ring_are_a_cycle_of_three() -> None:
    ring = {rank: waiting(receive(rank, (rank + 1) % 3, members=(0, 1, 2))) for rank in range(3)}
    found = given(ring)
    assert found.cycle == (0, 1, 2)
    assert str(found).endswith("Cycle 0 → 1 → 2 → 0. Let one of them send first, or use sendrecv().")


def test_a_rank_that_waits_for_a_cycle_is_stuck_too_but_not_in_the_cycle() -> None:
    found = given({**two_receive(), 2: waiting(receive(2, 0))})
    assert found.ranks == (0, 1, 2)
    assert found.cycle == (0, 1)


def test_two_large_sends_wait_for_their_receivers() -> None:
    found = given({0: waiting(send(0, 1)), 1: waiting(send(1, 0))})
    assert found.cycle == (0, 1)
    assert "large ones wait for their receiver" in found.cure


def test_a_chain_that_ends_in_a_rank_at_work_is_no_deadlock() -> None:
    assert judge({0: waiting(receive(0, 1)), 1: waiting(receive(1, 2)), 2: computing(2)}) is None


def test_slow_is_not_dead_whatever_the_time() -> None:
    slow = {rank: waiting(collective(rank, since=NOW - 3600), since=NOW - 3600) for rank in range(3)}
    assert judge({**slow, 3: computing(3, since=NOW - 3600)}) is None


@pytest.mark.parametrize("condition", ["stopped", "silent"])
def test_a_rank_that_is_stopped_or_silent_may_come_back(condition: str) -> None:
    assert judge({0: waiting(receive(0, 1)), 1: Seen(condition, None, at=NOW)}) is None  # type: ignore[arg-type]


def test_a_rank_that_has_not_begun_or_not_answered_may_still_come() -> None:
    idle = Seen("running", RankState(1, 100), at=NOW)
    assert judge({0: waiting(receive(0, 1)), 1: idle}) is None
    assert judge({0: waiting(receive(0, 1)), 1: Seen("running", None, at=NOW)}) is None


def test_a_wait_of_which_nothing_is_known_can_end() -> None:
    assert judge({0: waiting(receive(0, 1)), 1: waiting(Wait("Fence", 1, since=NOW - 9), since=NOW - 9)}) is None
    unknown_peer = replace(receive(1, None), peer=5, members=())
    assert judge({0: waiting(receive(0, 1)), 1: waiting(unknown_peer)}) is None


# Messages


def test_a_receive_ends_when_its_send_is_there() -> None:
    assert judge({0: waiting(receive(0, 1, 3)), 1: waiting(send(1, 0, 3))}) is None


@pytest.mark.parametrize(
    ("incoming", "outgoing"),
    [
        (receive(0, 1, 3), send(1, 0, 4)),  # another tag
        (receive(0, 1, on="world/dup 1"), send(1, 0)),  # another communicator
        (receive(0, 2), send(1, 0)),  # another source: rank 2 has finished
        (receive(0, 1), send(1, 2)),  # another destination
    ],
)
def test_a_send_that_does_not_fit_helps_nobody(incoming: Wait, outgoing: Wait) -> None:
    assert stuck({0: waiting(incoming), 1: waiting(outgoing), 2: over(2)}) == (0, 1)


def test_tags_that_differ_are_named() -> None:
    found = given({0: waiting(receive(0, 1, 3)), 1: waiting(send(1, 0, 4))})
    assert found.cure == "Rank 0 receives tag 3, rank 1 sends tag 4: use one tag on both sides."


def test_communicators_that_differ_are_named() -> None:
    found = given({0: waiting(receive(0, 1, on="world/dup 1")), 1: waiting(send(1, 0))})
    assert found.cure == (
        "Rank 0 receives on 'world/dup 1', rank 1 sends on 'world': use one communicator on both sides."
    )


def test_any_tag_takes_every_tag() -> None:
    assert judge({0: waiting(receive(0, 1, None)), 1: waiting(send(1, 0, 9))}) is None


def test_a_message_in_flight_comes_even_if_its_sender_has_finished() -> None:
    assert judge({0: waiting(receive(0, 1)), 1: over(1, under_way=(send(1, 0),))}) is None
    assert stuck({0: waiting(receive(0, 1)), 1: over(1, under_way=(send(1, 0, 5),))}) == (0,)
    waits_elsewhere = waiting(receive(1, 0, 8), under_way=[send(1, 0)])
    assert judge({0: waiting(receive(0, 1)), 1: waits_elsewhere}) is None


def test_a_message_that_was_still_in_flight_at_the_first_look_may_have_come_since() -> None:
    now = {0: waiting(receive(0, 1)), 1: waiting(receive(1, 0))}
    before = earlier({0: now[0], 1: waiting(receive(1, 0), under_way=[send(1, 0)])})
    assert verdict(before, now, at=NOW) is None
    assert verdict(earlier(now), now, at=NOW) is not None


def test_a_send_ends_when_its_receive_was_begun() -> None:
    assert stuck({0: waiting(send(0, 1)), 1: waiting(receive(1, 2), under_way=[receive(1, 0)]), 2: over(2)}) == (1,)
    assert stuck({0: waiting(send(0, 1)), 1: waiting(receive(1, 2)), 2: over(2)}) == (0, 1)


def test_a_receive_from_any_ends_when_one_member_can_go_or_sends() -> None:
    three = (0, 1, 2)
    anyone = waiting(receive(0, None, members=three))
    assert judge({0: anyone, 1: over(1), 2: computing(2)}) is None
    assert judge({0: anyone, 1: over(1), 2: waiting(send(2, 0, members=three))}) is None
    found = given({0: anyone, 1: over(1), 2: over(2)})
    assert (found.kind, found.ranks) == ("unmatched", (0,))
    assert found.cure == (
        "Ranks 1 and 2 finished the cell without a send to rank 0 under tag 0: "
        "let one of them send, or leave the receive out."
    )


def test_a_send_to_oneself_meets_ones_own_receive_only() -> None:
    assert judge({0: waiting(send(0, 0), under_way=[receive(0, 0)])}) is None
    found = given({0: waiting(send(0, 0))})
    assert found.cycle == (0,)


def test_a_receive_from_a_rank_that_has_left_is_unmatched() -> None:
    for condition, manner in [("finished", "finished the cell"), ("failed", "failed")]:
        found = given({0: waiting(receive(0, 1, 2)), 1: over(1, condition)})
        assert (found.kind, found.cycle) == ("unmatched", ())
        assert found.cure.startswith(f"Rank 1 {manner} without a send to rank 0 under tag 2")
    found = given({0: waiting(send(0, 1, 2)), 1: over(1)})
    assert found.cure.startswith("Rank 1 finished the cell without a receive from rank 0 under tag 2")


def test_a_rank_that_is_gone_never_sends() -> None:
    found = given({0: waiting(receive(0, 1)), 1: over(1, "gone")})
    assert found.cure.startswith("Rank 1 died: start it again with lab.heal()")
    assert found.lines[1] == "rank 1  is gone: its process has ended"


def test_a_rank_without_a_part_in_the_cell_never_comes_unless_it_does_something_else() -> None:
    found = given({0: waiting(collective(0, members=PAIR)), 1: over(1, "absent")})
    assert found.cure == "Rank 1 has no part in the cell: run it on every rank it needs."
    assert found.lines[1] == "rank 1  has no part in the cell"
    assert judge({0: waiting(receive(0, 1)), 1: over(1, "absent", doing="computing")}) is None


def exchange(me: int, other: int, tag: int, back: int, **more: object) -> Wait:
    """Plain mpi4py's Sendrecv: from outside, nobody sees which side is over."""
    sides = (send(me, other, tag, members=PAIR, count=1), receive(me, other, back, members=PAIR, count=1))
    return several("any", *(replace(side, **more) for side in sides))  # type: ignore[type-var]


def test_two_ends_that_both_wait_for_long_have_met_before() -> None:
    halves = {0: waiting(exchange(0, 1, 0, 7)), 1: waiting(exchange(1, 0, 0, 0))}
    assert stuck(halves) == (0, 1)
    assert verdict(earlier(halves), halves, at=NOW, patience_s=2.0) is None
    younger = {**halves, 1: waiting(exchange(1, 0, 0, 0), since=NOW - 0.5)}
    assert judge(younger) is None


def test_large_messages_and_those_of_unknown_size_get_more_time() -> None:
    for more in ({"count": 10_000_000, "dtype": "float32"}, {"count": None}):
        seen = {0: waiting(exchange(0, 1, 0, 7, **more)), 1: waiting(exchange(1, 0, 0, 0, **more))}
        assert judge(seen) is None
    bits = {"count": 100_000, "dtype": "float32"}
    seen = {0: waiting(exchange(0, 1, 0, 7, **bits)), 1: waiting(exchange(1, 0, 0, 0, **bits))}
    assert stuck(seen) == (0, 1)
    seen = {rank: replace(one, state=replace(one.state, since=NOW - 1.05)) for rank, one in seen.items()}  # type: ignore[type-var]
    assert judge(seen) is None


# Several at once


def test_waiting_for_all_ends_only_if_every_part_can() -> None:
    both = several("all", receive(0, 1), receive(0, 2))
    assert stuck({0: waiting(both), 1: computing(1), 2: over(2)}) == (0,)
    assert judge({0: waiting(both), 1: computing(1), 2: waiting(send(2, 0))}) is None


def test_waiting_for_any_ends_if_one_part_can() -> None:
    one = several("any", receive(0, 1), receive(0, 2))
    assert judge({0: waiting(one), 1: computing(1), 2: over(2)}) is None
    assert stuck({0: waiting(one), 1: over(1), 2: over(2)}) == (0,)


def test_a_part_of_a_wait_is_a_message_under_way_for_others() -> None:
    exchange = several("all", send(1, 0), receive(1, 2))
    assert stuck({0: waiting(receive(0, 1)), 1: waiting(exchange), 2: over(2)}) == (1,)


# Collectives


def test_a_collective_goes_on_when_all_have_come() -> None:
    assert judge({rank: waiting(collective(rank, members=(0, 1))) for rank in range(2)}) is None
    passed = computing(1, entered={"world": 2})
    assert judge({0: waiting(collective(0, members=PAIR)), 1: passed}) is None


def test_a_rank_that_left_without_the_collective_is_named() -> None:
    three = (0, 1, 2)
    seen = {rank: waiting(collective(rank, members=three)) for rank in (0, 1)} | {2: over(2, entered={"world": 0})}
    found = given(seen)
    assert (found.kind, found.ranks, found.cycle) == ("missing", (0, 1), ())
    assert found.cure == ("Every rank of 'world' must make the call barrier(): rank 2 finished the cell without it.")
    assert found.edges == ((0, 2, "barrier()"), (1, 2, "barrier()"))
    assert judge({**seen, 2: over(2, entered={"world": 1})}) is None


def test_a_rank_that_waits_for_one_in_the_barrier_never_comes_there() -> None:
    three = (0, 1, 2)
    found = given(
        {0: waiting(collective(0, members=three)), 1: waiting(collective(1, members=three)), 2: waiting(receive(2, 0))}
    )
    assert (found.kind, found.cycle) == ("deadlock", (0, 2))
    assert found.cure == (
        "Every rank of 'world' must make the call barrier(): rank 2 is in recv(src=0, tag=0) instead."
    )


def test_one_collective_is_counted_on_each_communicator_by_itself() -> None:
    on_pair = waiting(collective(0, on="pair", members=(2, 0)), entered={"pair": 1, "world": 5})
    other = over(2, entered={"world": 5})
    assert stuck({0: replace(on_pair), 1: over(1), 2: other}) == ()
    first_there = replace(collective(1, on="pair", members=(2, 0)), rank=1)
    assert stuck({0: waiting(first_there), 1: computing(1), 2: other}) == (0,)


def test_sub_communicators_number_their_ranks_anew() -> None:
    members = (3, 1)  # rank 0 of this communicator is rank 3 of the world
    in_world = {
        3: waiting(receive(0, 1, on="pair", members=members)),
        1: waiting(receive(1, 0, on="pair", members=members)),
        0: computing(0),
        2: computing(2),
    }
    assert given(in_world).cycle == (1, 3)
    in_world[1] = waiting(send(1, 0, on="pair", members=members))
    assert judge(in_world) is None


@pytest.mark.parametrize("operation", ["Bcast", "reduce", "Scatterv", "Gather", "Scan", "exscan", "Alltoallw"])
def test_a_raw_collective_with_a_root_may_go_on_while_one_missing_rank_can(operation: str) -> None:
    three = (0, 1, 2)
    one = waiting(collective(0, operation, on=RAW, members=three))
    assert judge({0: one, 1: computing(1), 2: over(2)}) is None
    assert stuck({0: one, 1: over(1), 2: over(2)}) == (0,)


@pytest.mark.parametrize(
    "operation", ["Barrier", "allreduce", "Allgather", "alltoall", "Dup", "Split", "Ibarrier", "Allreduce_init"]
)
def test_a_raw_collective_that_needs_all_is_stuck_without_one(operation: str) -> None:
    one = waiting(collective(0, operation, on=RAW, members=(0, 1, 2)))
    assert stuck({0: one, 1: computing(1), 2: over(2)}) == (0,)
    assert judge({0: one, 1: computing(1), 2: computing(2)}) is None


def test_labkits_own_collectives_need_all_ranks_with_a_root_too() -> None:
    one = waiting(collective(0, "broadcast", members=(0, 1, 2)))
    assert stuck({0: one, 1: computing(1), 2: over(2)}) == (0,)


# Different collectives


def test_different_raw_collectives_are_named_rank_by_rank() -> None:
    three = (0, 1, 2)
    seen = {
        0: waiting(collective(0, "Bcast", 3, on=RAW, members=three, signature="Bcast(root=0, float32 × 4)")),
        1: waiting(collective(1, "Barrier", 3, on=RAW, members=three, signature="Barrier()")),
        2: waiting(collective(2, "Bcast", 3, on=RAW, members=three, signature="Bcast(root=0, float32 × 4)")),
    }
    found = given(seen)
    assert (found.kind, found.ranks, found.cycle) == ("mismatch", (0, 1, 2), ())
    assert found.cure == (
        "Collective number 3 on 'MPI.COMM_WORLD' differs: ranks 0 and 2 call Bcast(root=0, float32 × 4), "
        "rank 1 calls Barrier(). Let every rank make the same collectives in the same order."
    )
    assert (0, 1) in [edge[:2] for edge in found.edges]


def test_a_raw_mismatch_counts_even_where_another_rank_has_passed_or_computes() -> None:
    three = (0, 1, 2)
    history = {RAW: ("Bcast(root=1, int64 × 1)", "Barrier()")}
    seen = {
        0: waiting(collective(0, "Bcast", 1, on=RAW, members=three, signature="Bcast(root=0, int64 × 1)")),
        1: waiting(
            collective(1, "Barrier", 2, on=RAW, members=three, signature="Barrier()"), history=history, entered={RAW: 2}
        ),
        2: computing(2),
    }
    found = given(seen)
    assert (found.kind, found.ranks) == ("mismatch", (0,))
    assert found.cure.endswith("Give the same root on every rank.")
    same = {RAW: ("Bcast(root=0, int64 × 1)", "Barrier()")}
    seen[1] = replace(seen[1], state=replace(seen[1].state, history=same))  # type: ignore[type-var]
    assert judge(seen) is None


def test_arguments_that_differ_are_named_as_such() -> None:
    calls = [f"Allreduce(SUM, {dtype} × 4)" for dtype in ("float32", "float64")]
    found = given({r: waiting(collective(r, "Allreduce", on=RAW, members=PAIR, signature=calls[r])) for r in range(2)})
    assert found.cure.endswith("Give the same arguments (dtype, count, operation) on every rank.")


def test_a_call_too_old_to_be_remembered_proves_nothing() -> None:
    seen = {
        0: waiting(collective(0, "Bcast", 1, on=RAW, members=PAIR, signature="Bcast(root=0)")),
        1: computing(1, entered={RAW: 9}, history={RAW: ("Barrier()",) * 8}),
    }
    assert judge(seen) is None


def test_labkits_own_mismatch_shows_itself_once_all_have_come() -> None:
    three = (0, 1, 2)
    seen = {r: waiting(collective(r, name, members=three)) for r, name in enumerate(["barrier", "all_reduce"])}
    assert judge({**seen, 2: waiting(collective(2, members=three))}) is None
    assert judge({**seen, 2: computing(2)}) is None
    found = given({**seen, 2: over(2)})
    assert (found.kind, found.ranks) == ("mismatch", (0, 1))


# Only what is proven


def test_a_rank_that_is_in_another_wait_by_now_is_no_proof() -> None:
    now = two_receive()
    before = earlier(two_receive(serial=6))
    assert verdict(before, now, at=NOW) is None


def test_a_rank_that_got_no_processor_time_had_no_chance_to_look() -> None:
    now = two_receive()
    before = earlier(now)
    before[1] = replace(before[1], state=now[1].state)
    assert verdict(before, now, at=NOW) is None


def test_a_wait_must_have_settled() -> None:
    now = two_receive()
    assert verdict(earlier(now), now, at=NOW - 1.0) is None
    assert verdict(earlier(now), now, at=NOW, settled_s=1.3) is None
    assert verdict(earlier(now), now, at=NOW, settled_s=1.1) is not None


def test_a_wait_must_be_older_than_the_first_look() -> None:
    now = two_receive()
    assert verdict(earlier(now, by=1.5), now, at=NOW) is None
    assert verdict(earlier(now, by=1.1), now, at=NOW) is not None


def test_a_rank_must_have_left_before_the_first_look() -> None:
    now = {0: waiting(receive(0, 1)), 1: over(1)}
    assert verdict(earlier({0: now[0], 1: computing(1)}), now, at=NOW) is None
    assert verdict(earlier(now), now | {1: over(1, since=NOW - 0.1)}, at=NOW) is None
    assert verdict(earlier(now), now | {1: over(1, doing="computing")}, at=NOW) is None
    assert verdict(earlier(now), now, at=NOW) is not None


def test_a_new_process_in_a_ranks_place_is_no_proof() -> None:
    now = two_receive()
    assert verdict(earlier(two_receive(pid=99)), now, at=NOW) is None


def test_nobody_at_all_is_no_deadlock() -> None:
    assert verdict({}, {}) is None


def test_without_a_moment_the_clock_is_read() -> None:
    past = time.time() - 3000.0
    now = {rank: replace(one, at=past) for rank, one in two_receive().items()}
    assert verdict(earlier(now), now) is not None


# Any moment in words


def test_every_condition_has_its_line() -> None:
    seen = {
        0: waiting(collective(0), 3),
        1: computing(1),
        2: Seen("stopped"),
        3: Seen("silent"),
        4: over(4, "gone"),
        5: over(5, "failed"),
        6: Seen("running", RankState(6, 1)),
        7: Seen("running"),
    }
    assert describe(seen, NOW) == [
        "rank 0  barrier()   cell line 3   waiting 1.2 s",
        "rank 1  computing   cell line 5   for 12 s",
        "rank 2  is stopped (SIGSTOP)",
        "rank 3  does not answer: it is in C code that lets nothing else run",
        "rank 4  is gone: its process has ended",
        "rank 5  has failed and left the cell",
        "rank 6  has not begun with the cell",
        "rank 7  has not answered yet",
    ]


def test_many_ranks_that_do_the_same_share_a_line() -> None:
    seen = {rank: over(rank) for rank in range(1, 12)}
    seen[0] = waiting(receive(0, None, members=range(12)))
    assert describe(seen, NOW) == [
        "rank 0         recv(src=any, tag=0)   cell line 1   waiting 1.2 s",
        "ranks 1 to 11  have finished the cell",
    ]


def test_stragglers_are_named_with_those_who_wait() -> None:
    seen = {rank: waiting(collective(rank)) for rank in range(3)} | {3: computing(3)}
    assert stragglers(seen, NOW) == [
        "rank 3 is still computing (cell line 5, 12 s); ranks 0 to 2 wait for it in barrier()"
    ]
    seen[1] = waiting(receive(1, 3))
    assert stragglers(seen, NOW) == [
        "rank 3 is still computing (cell line 5, 12 s); ranks 0 and 2 wait for it in barrier(), "
        "rank 1 waits for it in recv(src=3, tag=0)"
    ]
    assert stragglers({**seen, 3: Seen("stopped")}, NOW)[0].startswith("rank 3 is stopped (SIGSTOP); ranks 0 and 2")


def test_nobody_is_a_straggler_for_whom_nobody_waits() -> None:
    assert stragglers({0: computing(0), 1: computing(1)}, NOW) == []
    assert stragglers({0: waiting(receive(0, 1)), 1: over(1)}, NOW) == []


@pytest.mark.parametrize(
    ("seconds", "words"), [(-1, "0.0 s"), (1.24, "1.2 s"), (9.96, "10 s"), (119.4, "119 s"), (200.0, "3 min 20 s")]
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("ranks", "words"), [([2], "rank 2"), ([0, 1], "ranks 0 and 1"), ([3, 0, 1], "ranks 0, 1 and 3")]
)
def test_ranks_in_words(ranks: list[int], words: str) -> None:
    assert rank_list(ranks) == words
    assert rank_list(range(4)) == "ranks 0 to 3"
