"""The cases under `cases/` pass on worlds of 1 to 4 real ranks."""

from __future__ import annotations

import re

import pytest

from tests.mpi.launch import run

OPTIMIZERS = "tests/mpi/cases/check_training.py::test_another_optimizer_follows_one_rank_too"

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.timeout(420)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_case_passes_on_a_world_of(ranks: int) -> None:
    # torch's optimizers take each rank half a minute of a core to load: worlds of 2 and 3 show what they have to show.
    spared = [] if ranks in (2, 3) else ["--deselect", OPTIMIZERS]
    done = run(ranks, ["tests/mpi/cases", *spared], limit_s=400)
    assert done.returncode == 0, done.stdout[-6000:]
    assert len(re.findall(r"\d+ passed", done.stdout)) == ranks, done.stdout[-3000:]
