"""What the wait benchmark makes of the ranks' figures."""

from __future__ import annotations

from labkit.bench.wait import RANKS, _goals, _row


def measured(what: str, nbytes: int, raw: list[float], ours: list[float]) -> dict[str, object]:
    return {"what": what, "nbytes": nbytes, "us": {"raw": raw, "ours": ours}}


def test_a_row_compares_round_by_round() -> None:
    row = _row(2, measured("all_reduce", 8, [1.0, 10.0, 2.0], [2.0, 11.0, 5.0]))
    assert row["added_us"] == 1.0  # of 1, 1 and 3; the difference of the medians is another one
    assert row["ratio"] == {"median": 2.0, "min": 1.1, "max": 2.5}
    assert (row["raw_us"]["median"], row["ours_us"]["median"]) == (2.0, 5.0)


def test_goals_look_at_the_smallest_and_at_the_worst_large_message() -> None:
    rows = [
        _row(ranks, each)
        for ranks in RANKS
        for each in (
            measured("send, recv", 8, [1.0], [6.0]),
            measured("send, recv", 4096, [1.0], [9.0]),
            measured("send, recv", 64 << 10, [100.0], [130.0]),
            measured("send, recv", 1 << 20, [1000.0], [1010.0]),
            measured("watched Send, Recv", 8, [1.0], [2.5]),
        )
    ]
    goals = {goal.name: (round(goal.value, 9), goal.met) for goal in _goals(rows)}
    for ranks in RANKS:
        assert goals[f"send, recv, {ranks} ranks, 8 B: µs added"] == (5.0, True)
        assert goals[f"send, recv, {ranks} ranks, 64 KB and above: largest ratio"] == (1.3, False)
        assert goals[f"watched Send, Recv, {ranks} ranks, 8 B: µs added to a call"] == (0.75, True)
    assert len(goals) == 3 * len(RANKS)
