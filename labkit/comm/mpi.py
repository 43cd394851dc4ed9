"""mpi4py's MPI, started so that a process without a launcher leaves nothing behind.

Open MPI's shared-memory transport leaves its segment in /dev/shm when a process that no mpiexec started ends. Such a
process is alone and needs no transport but the one to itself.
"""

from __future__ import annotations

import os

__all__ = ["MPI", "REVOKES"]

_LAUNCHED = ("PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK")
_alone = "OMPI_MCA_btl" not in os.environ and not any(name in os.environ for name in _LAUNCHED)
if _alone:
    os.environ["OMPI_MCA_btl"] = "self"  # noqa: SIM112

from mpi4py import MPI  # noqa: E402

if _alone:
    del os.environ["OMPI_MCA_btl"]  # noqa: SIM112  (not for an mpiexec that this process starts later)

REVOKES = os.environ.get("OMPI_MCA_mpi_ft_enable") == "1"  # noqa: SIM112
"""Whether a blocked call can be broken and a rank's death survived: Open MPI under ``mpirun --with-ft ulfm``."""
