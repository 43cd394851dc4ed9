"""The command-line program run whole: under mpiexec, by its own start, and on gloo."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.cluster.implementations import mpiexec_command
from labkit.train import History
from tests.unit.sample_files import write_files

pytestmark = pytest.mark.usefixtures("nothing_left")

LINE = re.compile(
    r"Rank: (\d+)/(\d+), train loss: \d+\.\d{6}, train acc: \d+\.\d\d%, "
    r"test loss: \d+\.\d{6}, test acc: \d+\.\d\d%\."
)
TIMES = re.compile(r"\nreal \d+m\d+\.\d{3}s\nuser \d+m\d+\.\d{3}s\nsys \d+m\d+\.\d{3}s\n$")
QUICK = ["--dataset", "digits", "--size", "600", "--model", "lenet", "--no-cuda"]
MODULE = [sys.executable, "-m", "labkit.train"]


def run(command: list[str], environment: dict[str, str] | None = None, limit_s: float = 150) -> tuple[int, str, str]:
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        out, err = process.communicate(timeout=20)
        pytest.fail(f"ended after {limit_s:g} s\n{out}\n{err}")
    return process.returncode, out, err


def under_mpiexec(ranks: int, *options: str) -> tuple[int, str, str]:
    command, environment = mpiexec_command(ranks)
    return run([*command, *MODULE, *options], environment)


def check_output(out: str, ranks: int) -> list[str]:
    """The settings first, one line a rank in rank order, the times last; returns the lines of the ranks."""
    lines = out.splitlines()
    assert re.fullmatch(r"Namespace\(backend='\w+', batch_size=\d+, .*\)", lines[0])
    assert "rank=0, " in lines[0] and f"world_size={ranks}" in lines[0]
    found = [match for match in map(LINE.fullmatch, lines[1:]) if match]
    assert [(int(m[1]), int(m[2])) for m in found] == [(rank + 1, ranks) for rank in range(ranks)]
    assert lines[1 : 1 + ranks] == [match[0] for match in found]
    assert TIMES.search(out)
    assert len(lines) == 1 + ranks + 1 + 3
    return lines[1 : 1 + ranks]


@pytest.mark.timeout(200)
def test_under_mpiexec_it_prints_settings_ranks_in_order_and_times() -> None:
    status, out, err = under_mpiexec(4, *QUICK, "--batch-size", "32")
    assert status == 0, err
    lines = check_output(out, 4)
    assert len({line.split("test loss")[1] for line in lines}) == 1  # one model, tested on the whole test set
    assert len({line.split(",")[1] for line in lines}) == 4  # trained on parts of the data
    assert re.search(r"^epoch 1/1  loss .* replicas differ by 0$", err, re.MULTILINE)


@pytest.mark.timeout(300)
def test_three_ranks_end_where_one_does_with_three_times_the_batch(tmp_path: Path) -> None:
    # Small steps: with larger ones the rounding can come to decide which of two pixels is the larger.
    options = [*QUICK, "--optimizer", "sgd", "--learning-rate", "0.01", "--epochs", "2"]
    together, alone = tmp_path / "together.json", tmp_path / "alone.json"
    status, _, err = under_mpiexec(3, *options, "--batch-size", "10", "--save-history", str(together))
    assert status == 0, err
    status, out, err = run([*MODULE, *options, "--batch-size", "30", "--save-history", str(alone)])
    assert status == 0, err
    check_output(out, 1)
    ours, theirs = History.load(together), History.load(alone)
    assert ours.world_size == 3 and theirs.world_size == 1
    assert theirs.versions["transport"] == "one process"  # Open MPI alone would leave a segment in /dev/shm
    for row, expected in zip(ours.epochs, theirs.epochs, strict=True):
        assert row.loss == pytest.approx(expected.loss, abs=1e-6)
        assert row.test_loss == pytest.approx(expected.test_loss, abs=1e-6)
        assert row.replica_difference == 0


@pytest.mark.timeout(300)
def test_started_alone_it_starts_its_ranks() -> None:
    status, out, err = run([sys.executable, "-m", "labkit.cli", "train", "--world-size", "2", *QUICK])
    assert status == 0, err
    check_output(out, 2)


@pytest.mark.timeout(200)
def test_gloo_under_mpiexec_trains_the_same() -> None:
    by_mpi = under_mpiexec(2, *QUICK)
    by_gloo = under_mpiexec(2, *QUICK, "--backend", "gloo")
    assert (by_mpi[0], by_gloo[0]) == (0, 0), by_mpi[2] + by_gloo[2]
    assert "backend='gloo'" in by_gloo[1]
    assert check_output(by_gloo[1], 2) == check_output(by_mpi[1], 2)


@pytest.mark.timeout(200)
def test_gloo_started_by_hand_once_a_rank() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    options = [*QUICK, "--backend", "gloo", "--init-method", meeting, "--world-size", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    other = subprocess.Popen([*MODULE, *options, "--rank", "1"], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        status, out, err = run([*MODULE, *options, "--rank", "0"], environment)
        assert status == 0, err
        check_output(out, 2)
        assert other.communicate(timeout=30)[0] == "" and other.returncode == 0
    finally:
        other.kill()
        other.wait()


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--world-size", "3"], "labkit train: --world-size 3, but mpiexec started 2 ranks"),
        (
            ["--set", "a=1", "--dataset", "digits"],
            "labkit train: --set a: synchronous has no such setting; there are: sync",
        ),
        (["--root", "/no/such/folder"], "labkit train: root is /no/such/folder, which is not there"),
    ],
)
def test_what_cannot_be_used_is_one_line_and_status_2(options: list[str], words: str) -> None:
    status, out, err = under_mpiexec(2, *options)
    assert status == 2
    assert sum(line.startswith(words) for line in err.splitlines()) == 1
    assert "Traceback" not in err and "Rank:" not in out


@pytest.mark.timeout(200)
def test_data_that_is_broken_on_one_rank_alone_ends_all_ranks(tmp_path: Path) -> None:
    command, environment = mpiexec_command(2)
    # Only rank 1 is given a folder that is not there.
    script = 'import os, sys; rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK")\n'
    script += 'os.environ["LABKIT_DATA"] = sys.argv.pop(1) if rank == "1" else sys.argv.pop(1)[:0]\n'
    script += "from labkit.train import program; sys.exit(program.main())"
    options = [str(tmp_path / "no"), "--dataset", "auto", "--size", "100", "--model", "lenet"]
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "no_proxy": "*"}
    status, out, err = run([*command, sys.executable, "-c", script, *options], environment)
    assert status == 2 and "Rank:" not in out
    assert re.search(r"LABKIT_DATA is .*no, which is not there.* \(on rank 1\)", err)
    assert "Traceback" not in err


def damaged(path: Path) -> None:
    """Change a byte of the images: the header still looks well."""
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.timeout(300)
def test_files_are_handed_out_by_a_master_and_a_damaged_one_is_named_and_ends_all_ranks(tmp_path: Path) -> None:
    paths = write_files(tmp_path, "npz", (60, 90, 30), size=28)
    options = ["--train-files", str(tmp_path / "*.npz"), "--model", "lenet", "--no-cuda", "--batch-size", "16"]
    options += ["--method", "downpour", "--queue", "--slow", "1:2.0", "--epochs", "2"]
    status, out, err = under_mpiexec(3, *options)
    assert status == 0, err
    assert re.search(r"^epoch 2/2 ", err, re.MULTILINE) and out.count("Rank: ") == 3
    damaged(paths[1])
    status, out, err = under_mpiexec(3, *options)
    assert status != 0 and "Rank:" not in out
    assert re.search(rf"DataError: .*{paths[1].name}", err)


@pytest.mark.timeout(300)
def test_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    whole, rest = tmp_path / "whole.json", tmp_path / "rest.json"
    options = [*QUICK, "--validate", "inline", "--monitor"]
    status, _, err = under_mpiexec(2, *options, "--epochs", "2", "--save-history", str(whole))
    assert status == 0, err
    options += ["--checkpoint", str(tmp_path / "kept")]
    status, _, err = under_mpiexec(2, *options, "--epochs", "1", "--restore")  # there is none: begin
    assert status == 0, err
    status, _, err = under_mpiexec(2, *options, "--epochs", "2", "--restore", "--save-history", str(rest))
    assert status == 0, err
    ours, theirs = History.load(rest), History.load(whole)
    assert "after epoch 1" in ours.settings["restored"]
    assert [row.test_loss for row in ours.epochs] == [row.test_loss for row in theirs.epochs]
