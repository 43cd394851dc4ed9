"""How long a lab takes to start, beside a plain ipyparallel cluster with MPI engines."""

from __future__ import annotations

import os
import tempfile
import time
from statistics import median
from typing import Any

from labkit.bench import Goal, Outcome, spread
from labkit.cluster.implementations import find
from labkit.cluster.processes import tied_to_parent

__all__ = ["run"]

RANKS = 4
CELL = "answer = mpi_rank"


def labkit_start() -> tuple[float, float]:
    """Seconds from `labkit.start(4)` to the first answer of all ranks, and seconds to stop."""
    import labkit

    begin = time.perf_counter()
    lab = labkit.start(RANKS)
    lab.run(CELL)
    ready = time.perf_counter()
    lab.stop()
    return ready - begin, time.perf_counter() - ready


def plain_start() -> tuple[float, float]:
    """The same by `ipyparallel.Cluster(engines="mpi")` with its own defaults; only that it ends with this process."""
    import ipyparallel
    from ipyparallel.cluster.launcher import ipcontroller_cmd_argv
    from traitlets.config import Config

    tied = Config()
    tied.MPIEngineSetLauncher.mpi_cmd = [*tied_to_parent(), "mpiexec"]
    tied.LocalControllerLauncher.controller_cmd = [*tied_to_parent(), *ipcontroller_cmd_argv]
    begin = time.perf_counter()
    cluster = ipyparallel.Cluster(engines="mpi", n=RANKS, log_level=40, config=tied)
    client = cluster.start_and_connect_sync()
    client[:].execute(CELL, block=True)
    ready = time.perf_counter()
    cluster.stop_cluster_sync()
    client.close()
    return ready - begin, time.perf_counter() - ready


def run(*, quick: bool = False) -> Outcome:
    """Measure both in turn, five times each (`quick`: once)."""
    import ipyparallel  # noqa: F401  (both sides then start with it loaded)

    mpi = find()
    # Without these Open MPI refuses to start a plain cluster at all: as root, or with more ranks than cores.
    needed = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "PRTE_MCA_rmaps_default_mapping_policy")
    settings = {name: value for name, value in mpi.environment(RANKS).items() if name in needed}
    before = dict(os.environ)
    ours: list[tuple[float, float]] = []
    plain: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            os.environ |= settings | {"IPYTHONDIR": folder, "PATH": f"{mpi.mpiexec.parent}{os.pathsep}{before['PATH']}"}
            for _ in range(1 if quick else 5):
                plain.append(plain_start())
                ours.append(labkit_start())
        finally:
            os.environ.clear()
            os.environ.update(before)
    rows: list[dict[str, Any]] = [
        {
            "start": name,
            "to first answer s": spread([start for start, _ in times]),
            "stop s": spread([s for _, s in times]),
        }
        for name, times in ((f"labkit.start({RANKS})", ours), ('ipyparallel.Cluster(engines="mpi")', plain))
    ]
    ratios = [mine / theirs for (mine, _), (theirs, _) in zip(ours, plain, strict=True)]
    rows.append({"start": "ratio", "to first answer s": spread(ratios), "stop s": None})
    return Outcome("start", rows, [Goal("start-up against plain ipyparallel", round(median(ratios), 3), 0.45)])
