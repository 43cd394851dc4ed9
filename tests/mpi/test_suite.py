"""The cases under `cases/` pass on worlds of 1 and 3 real ranks, those about waiting on 2 and 4, too, some on 5."""

from __future__ import annotations

import os
import re

import pytest

from tests.mpi.launch import run

CASES = "tests/mpi/cases"
OPTIMIZERS = f"{CASES}/check_training.py::test_another_optimizer_follows_one_rank_too"
UPDATES = f"{CASES}/check_update_bench.py"
FUSED = f"{UPDATES}::test_every_gradient_is_applied_and_every_worker_stops[flat fused]"
MASTERS, BALANCE = (f"{CASES}/check_{name}.py" for name in ("master_runs", "balance"))
ALONE = [f"{CASES}/check_{name}.py" for name in ("world", "p2p", "collectives", "reductions", "masters", "watched")]
"""What one rank alone does of the others, the unit tests show."""
WAITING = [
    f"{CASES}/check_{name}.py"
    for name in ("board", "renewal", "waiting", "mismatch", "watched", "p2p", "collectives", "shared")
]

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        # torch's optimizers, and what else it builds on torch.distributed, take each rank long to load: one world
        # shows what they have to show.
        (1, ALONE),
        (2, [*WAITING, OPTIMIZERS, FUSED]),
        (3, [CASES, "--deselect", OPTIMIZERS, "--deselect", FUSED]),
        # Masters under a master need as many.
        (5, [MASTERS, BALANCE, "-k", "under_a_master or downpour-2 or downpour-masters"]),
        *((int(size), WAITING) for size in os.environ.get("LABKIT_WORLDS", "").split(",") if size),
    ],
)
def test_the_cases_pass_on_a_world_of(ranks: int, cases: list[str]) -> None:
    done = run(ranks, cases, limit_s=400)
    assert done.returncode == 0, done.stdout[-6000:]
    assert len(re.findall(r"\d+ passed", done.stdout)) == ranks, done.stdout[-3000:]
