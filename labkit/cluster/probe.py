"""What a rank can say of its MPI; as a program, ``python -m labkit.cluster.probe``, one JSON line a rank."""

from __future__ import annotations

import json

__all__ = ["mapped_segments", "mpi_library"]


def mpi_library() -> str:
    """Name and version of the MPI library that mpi4py uses in this process."""
    from mpi4py import MPI

    first_line = MPI.Get_library_version().strip("\0").splitlines()[0]
    return " ".join(first_line.split(",")[0].split())


def mapped_segments(pid: int | str = "self") -> list[str]:
    """Shared-memory files that a process (default: this one) has mapped and that still have a name.

    Raises
    ------
    OSError
        When there is no such process, or it is another user's.
    """
    with open(f"/proc/{pid}/maps") as regions:
        paths = {region.split(maxsplit=5)[-1].strip() for region in regions if "/dev/shm/" in region}
    return sorted(path for path in paths if not path.endswith(" (deleted)"))


def main() -> None:
    """Print this rank's line."""
    from mpi4py import MPI

    line = {"size": MPI.COMM_WORLD.size, "library": mpi_library(), "segments": mapped_segments()}
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
