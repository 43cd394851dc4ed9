"""The ipyparallel launchers behind `profiles/`: one MPI world as an engine set, with its settings found by itself.

A profile names them (``c.Cluster.engine_launcher_class = "labkit"``), so that a cluster started from JupyterLab's
cluster tab, by `labkit.start()` or by ``ipcluster start`` is the same.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from ipyparallel.cluster.launcher import LocalControllerLauncher, MPIEngineSetLauncher
from traitlets import Bool, default

from labkit.cluster.implementations import find
from labkit.cluster.processes import tied_to_parent

__all__ = ["ControllerLauncher", "RanksLauncher"]


class ControllerLauncher(LocalControllerLauncher):
    """ipyparallel's controller on loopback."""

    tied = Bool(True, config=True, help="End the controller when the process that started it dies.")

    def find_args(self) -> list[str]:
        """The controller's command line."""
        # Engines become ready at the second heartbeat, so its period (3 s by default) is most of a start.  A rank
        # that is stopped for a while is not dead: 600 missed beats are a minute.
        quick = ["--HeartMonitor.period=100", "--HeartMonitor.max_heartmonitor_misses=600", "--ip=127.0.0.1"]
        quick += ["--IPController.broadcast_scheduler_depth=0"]
        prefix = tied_to_parent() if self.tied else []
        return [*prefix, *super().find_args(), *quick]


class RanksLauncher(MPIEngineSetLauncher):
    """Engines that are the ranks of one MPI world on this machine."""

    tied = Bool(True, config=True, help="End the ranks when the process that started them dies.")

    @default("engine_cmd")
    def _engine_cmd_default(self) -> list[str]:
        return [sys.executable, "-m", "labkit.cluster.engine"]

    @default("engine_args")
    def _engine_args_default(self) -> list[str]:
        return ["--IPEngine.wait_for_url_file=60"]

    def start(self, n: int = 1) -> Any:
        """Start `n` ranks under the MPI that is found, with cores // n threads each."""
        mpi = find()
        self.mpi_cmd = [*(tied_to_parent() if self.tied else []), str(mpi.mpiexec)]
        self.mpi_args: list[str] = [*mpi.arguments(), *self.mpi_args]
        beside_python = Path(sys.executable).parent
        path = f"{beside_python}{os.pathsep}{os.environ.get('PATH', '')}"
        self.environment: dict[str, str] = {"PATH": path} | mpi.environment(n) | self.environment
        return super().start(n)
