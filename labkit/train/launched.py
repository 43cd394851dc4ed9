"""How this process came to be: as one rank of an MPI launcher's world, or alone."""

from __future__ import annotations

import os

__all__ = ["launched_local_size", "launched_rank", "launched_size", "local_rank"]

SIZE = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
LOCAL_SIZE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "LOCAL_RANK", "SLURM_LOCALID")
"""Where Open MPI, MPICH and Intel MPI, and for the last torchrun and Slurm, say it."""


def launched_size() -> int | None:
    """Return the number of ranks that an MPI launcher started, or None outside one; MPI is not touched."""
    return _number(SIZE)


def launched_rank() -> int:
    """Return this rank, 0 outside an MPI launcher."""
    return _number(RANK) or 0


def launched_local_size() -> int | None:
    """Return the number of ranks on this host, or None where nobody says."""
    return _number(LOCAL_SIZE)


def local_rank() -> int:
    """Return this rank's number among those on its host; 0 where nobody says."""
    return _number(LOCAL_RANK) or 0


def _number(names: tuple[str, ...]) -> int | None:
    for name in names:
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    return None
