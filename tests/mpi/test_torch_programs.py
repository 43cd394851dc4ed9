"""Programs that import only torch, under plain mpiexec: they run on MPI, and end by themselves whatever happens."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from labkit.cluster.implementations import mpiexec_command

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(100)]

GPUS = "nccl" if torch.cuda.is_available() else "gloo"
"""nccl does not start without a GPU, whatever stands beside it."""
MEETING = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")
PROGRAM = """
import torch
import torch.distributed as dist

assert dist.is_mpi_available()
dist.init_process_group({arguments})
x = torch.full((3,), dist.get_rank() + 1.0)
dist.all_reduce(x)
model = torch.nn.Linear(2, 1)
for parameter in model.parameters():
    dist.broadcast(parameter.data, 0)
print(f"rank {{dist.get_rank()}} of {{dist.get_world_size()}}: {{x.tolist()}}", flush=True)
{end}
"""
SAID = ["rank 0 of 2: [3.0, 3.0, 3.0]", "rank 1 of 2: [3.0, 3.0, 3.0]"]


def run(folder: Path, program: str, limit_s: float = 60) -> tuple[int, list[str], str]:
    """Exit status, lines and errors of a program on two ranks; fails if it does not end."""
    assert "import labkit" not in program and "from labkit" not in program
    file = folder / "program.py"
    file.write_text(program)
    command, environment = mpiexec_command(2)
    environment = {name: value for name, value in environment.items() if name not in MEETING}
    process = subprocess.Popen(
        [*command, sys.executable, str(file)],
        cwd=folder,
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
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
        pytest.fail(f"not ended after {limit_s:g} s\n{out}\n{err}")
    return process.returncode, sorted(out.splitlines()), err


@pytest.mark.parametrize(
    ("arguments", "end"),
    [
        ('"mpi"', "dist.destroy_process_group()"),
        ('backend="mpi"', ""),  # forgotten
        ('"labkit", init_method="mpi://"', ""),
        (f'"cpu:mpi,cuda:{GPUS}", init_method="mpi://"', "dist.destroy_process_group()"),
    ],
)
def test_they_need_no_address_and_no_other_import(tmp_path: Path, arguments: str, end: str) -> None:
    status, said, err = run(tmp_path, PROGRAM.format(arguments=arguments, end=end))
    assert (status, said) == (0, SAID), err


@pytest.mark.parametrize("end", ["dist.barrier()", "dist.recv(x, 1)", ""])
def test_a_rank_that_raises_ends_them_all(tmp_path: Path, end: str) -> None:
    raising = f"if dist.get_rank() == 1:\n    raise ValueError('no data here')\n{end}"
    status, said, err = run(tmp_path, PROGRAM.format(arguments='"mpi"', end=raising))
    assert status != 0
    assert said == SAID
    assert "ValueError: no data here" in err
