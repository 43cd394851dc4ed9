"""PyTorch's own tests of torch.distributed, from its wheel, on 3 ranks: nothing fails on "mpi".

With ``LABKIT_GLOO=1`` they run on gloo, too, and what passes there must pass on "mpi".
"""

from __future__ import annotations

import os

import pytest

from tests.mpi.torch_suite.driver import names, run

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(400)]


def test_nothing_fails_on_mpi_and_what_passes_on_gloo_passes() -> None:
    tests = names()
    mpi = run("mpi", tests, total_s=180)
    wrong = {name: ended for name, ended in mpi.items() if ended[0] in ("fail", "hang", "not run")}
    assert not wrong
    passed = {name for name, (how, _) in mpi.items() if how == "pass"}
    assert len(passed) > 80, "the suite itself does not run here"
    if os.environ.get("LABKIT_GLOO"):
        gloo = run("gloo", tests, total_s=180)
        on_gloo = {name for name, (how, _) in gloo.items() if how == "pass"}
        assert len(on_gloo) > 80 and on_gloo <= passed
        assert len(passed) > len(on_gloo)
