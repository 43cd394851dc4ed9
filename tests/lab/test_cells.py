"""Cells on the ranks: order, errors, interrupts."""

from __future__ import annotations

import _thread
import os
import re
import signal
import threading

import pytest

from labkit.cluster.cells import CellError, CellInterrupted, rank_list
from labkit.cluster.errors import ClusterError
from labkit.cluster.lab import Lab
from labkit.cluster.output import rank_text
from tests.conftest import eventually


def test_output_comes_in_rank_order_whatever_order_the_ranks_print_in(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.run("import time\ntime.sleep(0.1 * (2 - mpi_rank))\nprint('line one'); print('line two')")
    shown = capsys.readouterr().out.splitlines()
    assert shown == [f"rank {rank} │ line {word}" for rank in range(3) for word in ("one", "two")]


def test_a_cell_runs_on_the_ranks_that_are_named(lab: Lab) -> None:
    cell = lab.run("print(mpi_rank)", ranks=[0, 2], show=False)
    assert list(cell.results) == [0, 2]
    assert rank_text(cell) == "rank 0 │ 0\nrank 2 │ 2"
    with pytest.raises(ClusterError, match=r"no rank 3.*ranks 0 to 2"):
        lab.run("1", ranks=[3])


def test_the_first_error_is_shown_first_and_frees_the_others(lab: Lab) -> None:
    lab.run("kept = 'yes'", show=False)
    with pytest.raises(CellError) as caught:
        lab.run("import time\nif mpi_rank == 1: raise ValueError('boom')\ntime.sleep(600)", show=False)
    assert caught.value.first.rank == 1
    assert caught.value.first.name == "ValueError"
    assert caught.value.states[1] == "ValueError: boom"
    assert caught.value.states[0].startswith("interrupted")
    shown = "\n".join(caught.value._render_traceback_())
    assert shown.index("rank 1 failed first") < shown.index("boom") < shown.index("ranks 0 and 2: interrupted")
    cell = lab.run("print(kept)", show=False)
    assert [cell.text(rank, "stdout") for rank in range(3)] == ["yes\n"] * 3


def test_ranks_that_wait_for_a_failed_one_are_freed_and_the_next_all_reduce_is_right(lab: Lab) -> None:
    lab.run("import torch\nfrom labkit import comm", show=False)
    with pytest.raises(CellError) as caught:
        lab.run("if mpi_rank == 2: 1 / 0\ncomm.all_reduce(torch.ones(450_000))", show=False)
    assert caught.value.first.name == "ZeroDivisionError"
    assert not caught.value.stuck
    cell = lab.run("print(comm.all_reduce(torch.tensor([mpi_rank + 1.])).item())", show=False)
    assert [cell.text(rank, "stdout") for rank in range(3)] == ["6.0\n"] * 3


def test_interrupting_the_notebook_brings_every_rank_back_with_its_variables(lab: Lab) -> None:
    lab.run("import torch\nfrom labkit import comm\nkept = mpi_rank", show=False)

    def interrupt_once_running() -> None:
        eventually(lambda: lab.last is not None and len(lab.last.pending) == 3 and "in a receive" in lab.last.code)
        _thread.interrupt_main(signal.SIGINT)

    threading.Thread(target=interrupt_once_running).start()
    with pytest.raises(CellInterrupted) as caught:
        lab.run("comm.recv(torch.zeros(1), src=(comm.rank + 1) % 3)  # in a receive that nobody answers", show=False)
    assert not caught.value.stuck
    cell = lab.run("print(kept, comm.all_reduce(torch.ones(1)).item())", show=False)
    assert [cell.text(rank, "stdout") for rank in range(3)] == [f"{rank} 3.0\n" for rank in range(3)]


def test_a_killed_rank_is_named_and_the_cell_comes_back(lab: Lab) -> None:
    cell = lab.run("import time; time.sleep(600)", block=False)
    os.kill(lab.ranks[1].pid, signal.SIGKILL)
    with pytest.raises(CellError) as caught:
        lab.wait()
    assert caught.value.first.rank == 1
    assert caught.value.first.name == "RankDiedError"
    assert not cell.pending
    assert lab.status()[1].state == "gone"
    with pytest.raises(ClusterError, match=r"rank 1 is gone\.\nCure: lab\.heal\(\)"):
        lab.run("1")


def test_a_busy_rank_is_refused_a_second_cell_until_it_is_free(lab: Lab) -> None:
    lab.run("import time; time.sleep(600)", ranks=[1], block=False)
    with pytest.raises(ClusterError, match="Rank 1 is still at work"):
        lab.run("1")
    assert eventually(lambda: [row.state for row in lab.status()] == ["ready", "computing", "ready"])
    lab.interrupt()
    cell = lab.run("mpi_rank", show=False)
    assert not cell.pending


def test_a_stopped_rank_is_shown_as_stopped(lab: Lab) -> None:
    os.kill(lab.ranks[2].pid, signal.SIGSTOP)
    try:
        assert eventually(lambda: lab.status()[2].state == "stopped")
    finally:
        os.kill(lab.ranks[2].pid, signal.SIGCONT)
    lab.run("mpi_rank", show=False)


def test_long_output_is_cut_and_a_progress_bar_shows_its_end(lab: Lab) -> None:
    cell = lab.run("for i in range(1000): print(i)\nprint('10 %\\r100 %')", ranks=[0], show=False)
    lines = rank_text(cell).splitlines()
    assert len(lines) == 201
    assert lines[0] == "rank 0 │ … 801 lines before, see lab.last"
    assert lines[-1] == "rank 0 │ 100 %"


def test_a_warning_of_several_lines_is_shown_once_whichever_ranks_give_it(lab: Lab) -> None:
    code = (
        "import sys\nprint(f'alone\\non {mpi_rank}' if mpi_rank == 1 else 'the\\nsame', file=sys.stderr)\nprint('out')"
    )
    text = rank_text(lab.run(code, show=False))
    first = "rank 0 │ out\nrank 0 │ the\nrank 0 │ same\nrank 1 │ out\nrank 1 │ alone\nrank 1 │ on 1\n"
    assert text == f"{first}rank 2 │ out\nrank 2 │ the same 2 lines on stderr as rank 0"
    assert rank_text(lab.run("print('brief', file=sys.stderr)", show=False)).count("brief") == 3


def test_ranks_are_named_as_a_person_would() -> None:
    assert [rank_list(ranks) for ranks in ([2], [0, 1], [0, 1, 2, 3], [0, 2, 3])] == [
        "rank 2",
        "ranks 0 and 1",
        "ranks 0 to 3",
        "ranks 0, 2 and 3",
    ]


def test_variables_go_to_the_ranks_and_come_back_in_rank_order(lab: Lab) -> None:
    lab.push(base=40)
    assert lab.pull("base + mpi_rank") == [40, 41, 42]
    assert lab.pull("[mpi_rank] * 2", ranks=[2]) == [[2, 2]]
    with pytest.raises(CellError, match="NameError"):
        lab.pull("not_there")


def test_an_error_of_labkits_own_is_shown_at_the_cells_line_not_inside_labkit(lab: Lab) -> None:
    with pytest.raises(CellError) as caught:
        lab.run("from labkit import comm\nimport numpy as np\ncomm.all_reduce(np.ones(1 + comm.rank))", show=False)
    assert caught.value.first.name == "MismatchError"
    assert "all_reduce(np.ones(" in re.sub(r"\x1b\[[\d;]*m", "", caught.value.first.traceback)
    assert "agreement.py" not in caught.value.first.traceback
    assert "rank 2  all_reduce(sum, float64, shape (3,))" in caught.value.first.message
