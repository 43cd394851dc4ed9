"""Starting, joining, asking and stopping a lab."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import labkit
from labkit.cluster.errors import ClusterError, PreflightError, ProfileNotFoundError, StartError
from labkit.cluster.lab import Lab
from tests.conftest import eventually


def test_a_lab_is_one_world_with_ranks_in_order(lab: Lab) -> None:
    assert [info.rank for info in lab.ranks] == [0, 1, 2]
    cell = lab.run("from mpi4py import MPI\nprint(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)", show=False)
    assert [cell.text(rank, "stdout").split() for rank in range(3)] == [[str(rank), "3"] for rank in range(3)]


def test_the_card_shows_every_rank(lab: Lab) -> None:
    html, text = lab._repr_html_(), repr(lab)
    for info in lab.ranks:
        assert str(info.pid) in html
        assert str(info.pid) in text
    assert html.count("ready") == 3
    assert [row.state for row in lab.status()] == ["ready"] * 3
    assert all(row.memory and row.memory > 10_000_000 for row in lab.status())


def test_threads_are_cores_over_ranks(lab: Lab) -> None:
    cores = len(os.sched_getaffinity(0))
    assert [info.threads for info in lab.ranks] == [max(1, cores // 3)] * 3


def test_variables_stay_between_cells_and_are_each_ranks_own(lab: Lab) -> None:
    lab.run("mine = mpi_rank * 10", show=False)
    cell = lab.run("mine + 1", show=False)
    assert [cell.displays(rank)[0]["data"]["text/plain"] for rank in range(3)] == ["1", "11", "21"]


def test_restart_gives_fresh_ranks(lab: Lab) -> None:
    before = {info.pid for info in lab.ranks}
    lab.run("mine = 1", show=False)
    lab.restart()
    assert before.isdisjoint(info.pid for info in lab.ranks)
    cell = lab.run("'mine' in globals()", show=False)
    assert [cell.displays(rank)[0]["data"]["text/plain"] for rank in range(3)] == ["False"] * 3


def test_a_second_process_joins_and_sees_the_same_variables(lab: Lab) -> None:
    lab.run("mine = mpi_rank + 100", show=False)
    program = f"import labkit; labkit.connect({lab.session.cluster_id!r}).run('print(mine)')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"rank {rank} │ {rank + 100}" for rank in range(3)]
    assert lab.running
    lab.run("mine", show=False)


def test_joining_when_nothing_runs_says_how_to_start() -> None:
    with pytest.raises(ClusterError, match=r"labkit\.start\(\)"):
        labkit.connect("labkit-0-none")


@pytest.mark.parametrize("ranks", [0, -1, 2.5, True])
def test_a_wrong_number_of_ranks_is_refused(ranks: int) -> None:
    with pytest.raises(PreflightError, match="number of ranks"):
        labkit.start(ranks)


def test_ten_thousand_ranks_are_refused_with_how_many_fit() -> None:
    with pytest.raises(PreflightError, match=r"(?s)memory.*at most \d+ ranks") as caught:
        labkit.start(10_000)
    assert "\n" in str(caught.value)


def test_a_profile_that_is_not_there_lists_those_that_are() -> None:
    with pytest.raises(ProfileNotFoundError, match=r"there is: .*local"):
        labkit.start(2, profile="nowhere")


def test_mpiruns_own_reason_is_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRTE_MCA_rmaps_default_mapping_policy", ":nooversubscribe")
    with pytest.raises(StartError, match="not enough slots"):
        labkit.start(len(os.sched_getaffinity(0)) + 1)


def test_engines_that_are_not_one_world_are_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # A launcher that is not mpi4py's own leaves every engine alone in a world of size 1.
    shell = tmp_path / "mpiexec"
    shell.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then echo "mpirun (Open MPI) 5.0.0"; exit; fi\n'
        'shift 2; shift 2\nOMPI_MCA_btl=self "$@" & OMPI_MCA_btl=self "$@" & \ntrap "kill $(jobs -p)" TERM\nwait\n'
    )
    shell.chmod(0o755)
    monkeypatch.setattr("labkit.cluster.implementations.candidates", lambda: [shell])
    with pytest.raises(StartError, match="not one MPI world"):
        labkit.start(2)


def test_two_labs_at_once_do_not_disturb_each_other(lab: Lab) -> None:
    program = "import labkit; lab = labkit.start(2); lab.run('print(mpi_size)'); lab.stop()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["rank 0 │ 2", "rank 1 │ 2"], done.stderr
    lab.run("mpi_size", show=False)


def test_controller_and_watchers_listen_on_loopback_only(lab: Lab) -> None:
    # Open MPI's launcher and its ranks open a port each that no setting pins to an address: a limit the README states.
    ours = [mark for mark in lab.session.processes if mark.role == "controller" or mark.role.startswith("watcher")]
    processes = [process for mark in ours if (process := mark.process())]
    processes += processes[0].children(recursive=True)
    listening = [c for p in processes for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert len(listening) > 5
    assert {connection.laddr.ip for connection in listening} == {"127.0.0.1"}


def test_connection_files_are_private(lab: Lab) -> None:
    security = Path(lab.session.profile_dir) / "security"
    files = list(security.glob(f"*{lab.session.cluster_id}*.json"))
    assert files
    assert all(file.stat().st_mode & 0o077 == 0 for file in files if "ipcontroller" in file.name)


def test_steps_of_all_ranks_reach_the_notebook_and_a_stop_reaches_all_ranks(lab: Lab) -> None:
    store = lab.collector.store
    lab.run("from labkit import data, train\ndigits = data.load('digits', size=600)", show=False)
    train = (
        "history = train.synchronous(train.LeNet(), digits, epochs={}, batch_size=20, progress=False, validate=False)"
    )
    lab.run(train.format(2), show=False)
    assert eventually(lambda: store.received == 3 * 20)
    assert lab.collector.counts.lost == lab.collector.counts.dropped == 0
    assert all(list(store.series(rank)["step"]) == list(range(20)) for rank in range(3))
    lab.run(train.format(100_000), block=False)
    assert eventually(lambda: store.received > 3 * 40, 30)
    lab.collector.send_control(stop=True)
    lab.wait()
    assert len(set(lab.pull("len(history.steps)"))) == 1, "all ranks leave at the same step"
    assert all("stopped from the notebook" in stopped for stopped in lab.pull("history.stopped"))
    facts = labkit.facts()
    assert any("digits" in value for value in facts["data set"])
    assert facts["seed"]
