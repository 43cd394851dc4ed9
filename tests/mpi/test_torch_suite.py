"""PyTorch's own tests of torch.distributed, from its wheel, on 3 ranks: what passes on gloo passes on "mpi"."""

from __future__ import annotations

import pytest

from tests.mpi.torch_suite.driver import names, run

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(400)]


def test_what_passes_on_gloo_passes_on_mpi_and_nothing_fails() -> None:
    tests = names()
    mpi, gloo = (run(backend, tests, total_s=180) for backend in ("mpi", "gloo"))
    wrong = {name: ended for name, ended in mpi.items() if ended[0] in ("fail", "hang", "not run")}
    assert not wrong
    passed = {name for name, (how, _) in mpi.items() if how == "pass"}
    on_gloo = {name for name, (how, _) in gloo.items() if how == "pass"}
    assert len(on_gloo) > 80, "the suite itself does not run here"
    assert on_gloo <= passed
    assert len(passed) > len(on_gloo)
