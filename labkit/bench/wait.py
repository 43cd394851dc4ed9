"""What waiting in labkit costs beside raw mpi4py: messages, all-reduce, and the CPU that a waiting rank takes."""

from __future__ import annotations

from statistics import median
from typing import Any

from labkit.bench import Goal, Outcome, spread
from labkit.bench.world import measure

__all__ = ["run"]

RANKS = (2, 4)
RATIO, LARGE_BYTES = 1.15, 64 << 10
ADDED_US, ADDED_BY_WATCHING_US = 6.0, 1.0
CPU_PERCENT = 5.0
LIMIT_S = 400


def run(*, quick: bool = False) -> Outcome:
    """Measure on 2 and on 4 ranks, labkit's calls and raw blocking ones in turn (`quick`: few sizes and rounds).

    The raw calls are mpi4py's ``Allreduce``, ``Send`` and ``Recv`` on the same communicator and the same memory. A row
    gives microseconds for a call, or for a message one way, and the ratio of both round by round. The rows "watched"
    compare raw calls while `labkit.comm.watched` notes them with the same ones unnoted.

    Raises
    ------
    RuntimeError
        When the ranks fail.
    """
    rows: list[dict[str, Any]] = []
    cpu: dict[str, float] = {}
    for ranks in RANKS:
        measured = measure("labkit.bench.wait_ranks", ranks, quick=quick, limit_s=LIMIT_S)
        rows += [_row(ranks, each) for each in measured["rows"]]
        cpu |= measured["cpu"]
    goals = _goals(rows)
    for name, share in cpu.items():
        rows.append({"what": f"CPU while waiting in {name}", "ranks": RANKS[0], "cpu_percent": 100 * share})
        if name.startswith("labkit"):
            goals.append(Goal(f"CPU of a rank that waits in {name}, % of a core", 100 * share, CPU_PERCENT))
    return Outcome("wait", rows, goals)


def _row(ranks: int, measured: dict[str, Any]) -> dict[str, Any]:
    raw, ours = measured["us"]["raw"], measured["us"]["ours"]
    pairs = list(zip(ours, raw, strict=True))
    return {
        "what": measured["what"],
        "ranks": ranks,
        "bytes": measured["nbytes"],
        "raw_us": spread(raw),
        "ours_us": spread(ours),
        "ratio": spread([mine / theirs for mine, theirs in pairs]),
        "added_us": median(mine - theirs for mine, theirs in pairs),
    }


def _goals(rows: list[dict[str, Any]]) -> list[Goal]:
    goals = []
    for ranks in RANKS:
        for what in dict.fromkeys(row["what"] for row in rows):
            chosen = [row for row in rows if (row["what"], row["ranks"]) == (what, ranks)]
            name, added = f"{what}, {ranks} ranks", chosen[0]["added_us"]
            if what.startswith("watched"):
                calls = what.count(",") + 1
                goals.append(Goal(f"{name}, 8 B: µs added to a call", added / calls, ADDED_BY_WATCHING_US))
                continue
            goals.append(Goal(f"{name}, 8 B: µs added", added, ADDED_US))
            large = [row["ratio"]["median"] for row in chosen if row["bytes"] >= LARGE_BYTES]
            goals.append(Goal(f"{name}, 64 KB and above: largest ratio", max(large), RATIO))
    return goals
