"""The `labkit` command, run as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from labkit.cluster.status import machine_status
from tests.conftest import eventually

LABKIT = Path(sys.executable).parent / "labkit"


def labkit(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [LABKIT, *arguments], capture_output=True, text=True, timeout=110, check=False, stdin=subprocess.DEVNULL
    )


def ranks_of(labs: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [row for lab in labs if lab["id"] == name for row in lab["processes"] if row["role"].startswith("rank")]


def test_up_status_down() -> None:
    up = labkit("up", "--ranks", "2")
    assert up.returncode == 0, up.stderr
    name = up.stdout.split(" as ")[1].split()[0]
    try:
        (lab,) = [lab for lab in json.loads(labkit("status", "--json").stdout) if lab["id"] == name]
        assert lab["state"] == "running"
        assert [row["role"] for row in lab["processes"]] == ["controller", "mpiexec", "rank 0", "rank 1"]
        assert [row["state"] for row in lab["processes"][2:]] == ["ready", "ready"]
        joined = f"import labkit; labkit.connect({name!r}).run('print(mpi_size)')"
        done = subprocess.run([sys.executable, "-c", joined], capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout.splitlines() == ["rank 0 │ 2", "rank 1 │ 2"], done.stderr
        blocked = f"""if True:
            import labkit
            lab = labkit.connect({name!r})
            lab.run("from labkit import comm\\ncomm.barrier()", [1], block=False)
            input()
            lab.interrupt()
        """
        with subprocess.Popen([sys.executable, "-c", blocked], stdin=subprocess.PIPE, text=True) as notebook:
            assert eventually(
                lambda: [row["state"] for row in ranks_of(machine_status(), name)] == ["ready", "waiting"], 30
            )
            rows = ranks_of(json.loads(labkit("status", "--json").stdout), name)
            assert rows[1]["doing"].startswith("barrier(), cell line 2")
            assert rows[1]["doing"].endswith("for rank 0")
            assert "barrier(), cell line" in " ".join(labkit("status").stdout.split())
            notebook.communicate("\n", timeout=60)
        assert [row["state"] for row in ranks_of(machine_status(), name)] == ["ready", "ready"]
    finally:
        down = labkit("down", name)
    assert down.stdout == f"ended {name}\n"
    assert name not in labkit("status").stdout


def test_doctor_is_content_here_and_names_the_cure_elsewhere(tmp_path: Path) -> None:
    done = labkit("doctor")
    assert done.returncode == 0, done.stdout
    assert "two ranks see a world of size 2" in done.stdout
    assert "bad" not in done.stdout


def test_clean_finds_nothing_where_nothing_crashed() -> None:
    assert labkit("clean").stdout in ("nothing to clean\n",)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["up", "--ranks", "0"], "number of ranks"),
        (["up", "--ranks", "10000"], "memory"),
        (["up", "--profile", "nowhere"], "No profile 'nowhere'"),
        (["down", "labkit-0-nothing"], "There is no lab"),
        (["report", "nowhere.ipynb"], "nowhere.ipynb"),
        (["bench", "nothing"], "There is no benchmark"),
        (["train", "--dataset", "mnits"], "mnist"),
        (["train", "--world-size", "0"], "world-size"),
    ],
)
def test_bad_input_is_one_clear_error_and_status_2(arguments: list[str], words: str) -> None:
    done = labkit(*arguments)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [[], ["up"], ["doctor"], ["train"]])
def test_help_helps(command: list[str]) -> None:
    done = labkit(*command, "--help")
    assert done.returncode == 0
    assert "--help" in done.stdout


def test_a_failing_notebook_gives_a_report_up_to_there_the_error_and_status_1(tmp_path: Path) -> None:
    import nbformat

    cells = ["print('first', 'output')", "1 / 0", "print('last', 'output')"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbformat.write(notebook, tmp_path / "failing.ipynb")
    done = labkit("report", str(tmp_path / "failing.ipynb"), "--out", str(tmp_path))
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    html = Path(done.stdout.strip()).read_text()
    assert "first output" in html
    assert "last output" not in html
    assert "ZeroDivisionError" in html
