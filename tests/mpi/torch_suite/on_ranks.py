"""The part that runs on each rank: ``mpiexec -n 3 python -m tests.mpi.torch_suite.on_ranks BACKEND FILE LIMIT NAME…``.

PyTorch's suite starts its own processes for every test. Here the MPI ranks are the processes, for all tests in turn,
each with a process group of its own. Results go to ``FILE.rank``, a JSON line ``[name, outcome, message]`` a test.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import traceback
import unittest
import warnings
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from mpi4py import MPI

SUITE = "torch.testing._internal.distributed.distributed_test"
REWRITTEN = [
    # The back end that a test was written for: what gloo can do, ours must do, too.
    (r'BACKEND != "gloo"', 'BACKEND not in ("gloo", "mpi")'),
    (r'\{"gloo"\}', '{"gloo", "mpi"}'),
    # A collective of ours is over when it returns, so what the profiler shows of it begins and ends in one thread.
    (r"self\.assertTrue\((e|event)\.is_async\)", r"self.assertFalse(\1.is_async)"),
]
PATIENCE_S = 5
"""How much longer than a test may last all ranks have for it before they are ended."""

world = MPI.COMM_WORLD
between = world.Dup()
"""For waiting between tests, apart from what is tested and from what tests wait for."""


def load_suite(backend: str) -> ModuleType:
    """The suite, with what is said of gloo said of "mpi", too."""
    from torch.testing._internal import common_distributed

    if backend == "mpi":
        for feature in ("ddp", "subgroup", "gpu"):  # "gpu": some of its tests go without
            common_distributed.DistTestCases.backend_feature[feature].add("mpi")
        common_distributed.DistTestCases.skip_collective["allgather_coalesced"].discard("mpi")
    found = importlib.util.find_spec(SUITE)
    assert found is not None and found.origin is not None
    source = Path(found.origin).read_text()
    for pattern, replacement in REWRITTEN if backend == "mpi" else []:
        source, count = re.subn(pattern, replacement, source)
        assert count, f"PyTorch's suite has no {pattern} any more"
    module = importlib.util.module_from_spec(found)
    sys.modules[SUITE] = module
    exec(compile(source, found.origin, "exec", dont_inherit=True), module.__dict__)
    return module


def wait_for_all(here: MPI.Intracomm, limit_s: float = math.inf) -> None:
    """Return once every rank is here."""
    request, pause, end = here.Ibarrier(), threading.Event(), time.monotonic() + limit_s
    while not request.Test():
        pause.wait(0.0005)
        if time.monotonic() > end:
            raise TimeoutError("another rank has left the test")


def main(backend: str, path: str, limit_s: float, names: list[str]) -> None:
    """Run the tests and write down how each ended."""
    warnings.simplefilter("ignore")
    scratch = world.bcast(tempfile.mkdtemp() if world.rank == 0 else None)
    rank, size = world.rank, world.size
    os.environ |= {"BACKEND": backend, "WORLD_SIZE": str(size), "RANK": str(rank), "TEMP_DIR": scratch}
    os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if rank == 0:
        for folder in ("barrier", "test_dir", "init_dir"):
            os.makedirs(os.path.join(scratch, folder))
    import torch
    from torch import distributed as dist
    from torch.testing._internal.common_distributed import TEST_SKIPS
    from torch.testing._internal.common_utils import TestCase

    torch.set_num_threads(1)
    suite = load_suite(backend)
    base: Any = suite.DistributedTest._DistTestBase  # type: ignore[attr-defined]

    class Test(TestCase, base):
        """The suite's tests on this rank."""

        world_size = size
        file_name = ""
        among = between

        @property
        def init_method(self) -> str:
            """A fresh file for tests that begin again."""
            return f"file://{self.file_name}"

        def _barrier(self, *_: Any, **__: Any) -> None:
            wait_for_all(self.among, limit_s)

    Test.rank = rank  # type: ignore[attr-defined]
    skips = {str(skip.exit_code): name for name, skip in TEST_SKIPS.items()}
    with open(f"{path}.{rank}", "a", buffering=1) as out:
        for number, name in enumerate(names):
            Test.file_name = os.path.join(scratch, f"init{number}")
            Test.among = world.Dup()  # a rank that fails leaves others waiting there
            watch = threading.Timer(limit_s + PATIENCE_S, give_up, (out, name, threading.get_ident()))
            watch.daemon = True
            watch.start()
            limit = timedelta(seconds=limit_s)
            if backend == "mpi":
                dist.init_process_group("mpi", timeout=limit)
            else:
                store = f"file://{scratch}/rendezvous{number}"
                dist.init_process_group(backend, init_method=store, rank=rank, world_size=size, timeout=limit)
            torch.manual_seed(0)
            print(json.dumps([name, *outcome(Test(name), skips)]), file=out)
            wait_for_all(between)
            if dist.is_initialized():
                dist.destroy_process_group()
            watch.cancel()
    wait_for_all(between)
    if rank == 0:
        shutil.rmtree(scratch, ignore_errors=True)


def outcome(test: unittest.TestCase, skips: dict[str, str]) -> tuple[str, str]:
    """Run a test: "pass", "skip" or "fail", and why."""
    result = unittest.TestResult()
    try:
        test.run(result)
    except SystemExit as left:  # how the suite says that a test is skipped
        return ("skip", skips[str(left.code)]) if str(left.code) in skips else ("fail", f"exit {left.code}")
    if result.skipped:
        return "skip", result.skipped[0][1]
    wrong = result.errors + result.failures
    if not wrong:
        return "pass", ""
    said = re.search(r"SystemExit: (\d+)", wrong[0][1])
    if said and said[1] in skips:
        return "skip", skips[said[1]]
    return "fail", wrong[0][1][-1500:]


def give_up(out: TextIO, name: str, main_thread: int) -> None:
    """A test that does not end is told as such, with its stack, and ends the world."""
    stack = "".join(traceback.format_stack(sys._current_frames()[main_thread])[-6:])
    print(json.dumps([name, "hang", stack]), file=out, flush=True)
    MPI.COMM_WORLD.Abort(9)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), Path(sys.argv[4]).read_text().split())
