"""What each running lab has on this machine, on record, so that it can be joined, listed and cleaned up.

A session is a private folder in the temporary directory with one JSON file.  It names every process (by pid and
creation time, so that a reused pid is never mistaken for ours) and every shared-memory segment of one lab.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from labkit.cluster.errors import ClusterError

__all__ = ["ProcessMark", "Session", "adopt", "clean_stale", "private_folder", "remove_unmapped", "sessions"]


def private_folder() -> Path:
    """This user's folder for sessions, made if need be; nobody else can read it.

    Raises
    ------
    ClusterError
        When the folder cannot be made or belongs to somebody else.
    """
    folder = Path(tempfile.gettempdir()) / f"labkit-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ClusterError(
            f"{folder} cannot be made: {error.strerror}.", cure="set TMPDIR to a folder of yours"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ClusterError(f"{folder} is not a private folder of yours.", cure=f"remove it, or: chmod 700 {folder}")
    return folder


@dataclass(frozen=True)
class ProcessMark:
    """One process of a lab, recognised again by pid and creation time (seconds since the epoch)."""

    pid: int
    created: float
    role: str

    @classmethod
    def of(cls, pid: int, role: str) -> ProcessMark | None:
        """The mark of a living process, None when there is none."""
        try:
            return cls(pid, psutil.Process(pid).create_time(), role)
        except psutil.NoSuchProcess:
            return None

    def process(self) -> psutil.Process | None:
        """The process while it lives; None when it is gone, a zombie, or its pid is somebody else's by now."""
        try:
            process = psutil.Process(self.pid)
            return process if abs(process.create_time() - self.created) < 1.0 and lives(process) else None
        except psutil.NoSuchProcess:
            return None


@dataclass
class Session:
    """The record of one lab.

    Attributes
    ----------
    cluster_id
        ipyparallel's id of the cluster.
    profile_dir
        Folder of the ipyparallel profile it runs in.
    ranks
        World size.
    owner
        The process that started it; a lab that is not `detached` ends with it.
    segments
        Shared-memory files that its ranks mapped, as paths.
    """

    cluster_id: str
    profile_dir: str
    ranks: int
    owner: ProcessMark
    detached: bool = False
    started: float = field(default_factory=time.time)
    mpi: str = ""
    processes: list[ProcessMark] = field(default_factory=list)
    segments: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """Private folder of this session."""
        return private_folder() / self.cluster_id

    @property
    def cluster_file(self) -> Path:
        """ipyparallel's own record of the cluster."""
        return Path(self.profile_dir) / "security" / f"cluster-{self.cluster_id}.json"

    def save(self) -> None:
        """Write the record, whole or not at all."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        new = self.folder / "session.json.new"
        new.write_text(json.dumps(asdict(self), indent=1))
        new.replace(self.folder / "session.json")

    @classmethod
    def load(cls, folder: Path) -> Session | None:
        """Read the record in `folder`; None when there is none that can be read."""
        try:
            values = json.loads((folder / "session.json").read_text())
            values["owner"] = ProcessMark(**values["owner"])
            values["processes"] = [ProcessMark(**mark) for mark in values["processes"]]
            return cls(**values)
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def alive(self) -> list[psutil.Process]:
        """Processes of this lab that still run (its owner is not one of them)."""
        return [process for mark in self.processes if (process := mark.process())]

    @property
    def running(self) -> bool:
        """Whether the lab can still be used: its controller lives, and its owner unless it is detached."""
        controller = next((mark for mark in self.processes if mark.role == "controller"), None)
        held = self.detached or self.owner.process() is not None
        return held and controller is not None and controller.process() is not None

    @property
    def starting(self) -> bool:
        """Whether its owner lives but the controller is not on record yet."""
        return not self.processes and self.owner.process() is not None

    def remove(self, grace_s: float = 3.0) -> list[str]:
        """End what still runs, and remove every file of this lab.

        Returns what was removed, a line each.  Processes get SIGTERM, and SIGKILL after `grace_s` seconds.
        """
        removed = [f"process {process.pid}" for process in self.end_processes(grace_s)]
        removed += [f"shared memory {segment}" for segment in remove_unmapped(self.segments)]
        profile = Path(self.profile_dir)
        leftovers = [
            *(profile / "security").glob(f"*{self.cluster_id}*"),
            *(profile / "log").glob(f"*{self.cluster_id}*"),
            *(profile / "pid").glob(f"*{self.cluster_id}*"),
        ]
        for path in leftovers:
            path.unlink(missing_ok=True)
            removed.append(f"file {path}")
        shutil.rmtree(self.folder, ignore_errors=True)
        return removed

    def end_processes(self, grace_s: float) -> list[psutil.Process]:
        """Terminate, then kill, every process on record, and give back those that were there."""
        processes = self.alive()
        # A launcher's children that are not on record yet (a start that crashed half-way) go with it.
        for process in list(processes):
            try:
                processes += [child for child in process.children(recursive=True) if child not in processes]
            except psutil.NoSuchProcess:
                continue
        watchers = {mark.pid for mark in self.processes if mark.role.startswith("watcher")}
        for process in processes:
            # A watcher has nothing to save; told to end it would first try for seconds to reach its controller.
            send(process, signal.SIGKILL if process.pid in watchers else signal.SIGTERM)
        if not await_end(processes, grace_s):
            for process in processes:
                send(process, signal.SIGKILL)
            await_end(processes, grace_s)
        return processes


def lives(process: psutil.Process) -> bool:
    """Whether a process still runs; one that ended but was not reaped by its parent does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def send(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal to a process that may be gone by now."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def await_end(processes: list[psutil.Process], limit_s: float) -> bool:
    """Wait until none of `processes` lives; False when some still do after `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while any(map(lives, processes)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def remove_unmapped(segments: Iterable[str]) -> list[str]:
    """Remove those shared-memory files that no process has mapped any more."""
    there = {segment for segment in segments if os.path.exists(segment)}
    if not there:
        return []
    mapped: set[str] = set()
    for process in psutil.process_iter():
        try:
            mapped |= there.intersection(region.path for region in process.memory_maps(grouped=True))
        except psutil.Error:
            continue
    for segment in there - mapped:
        Path(segment).unlink(missing_ok=True)
    return sorted(there - mapped)


def adopt(profile_dir: Path) -> None:
    """Put clusters of `profile_dir` on record that labkit did not start itself: those of JupyterLab's cluster tab."""
    known = {session.cluster_id for session in sessions() if session.running or session.starting}
    for file in (profile_dir / "security").glob("cluster-*.json"):
        try:
            values = json.loads(file.read_text())
            name = values["cluster"]["cluster_id"]
            sets = values["engines"]["sets"].values()
            pids = {"controller": values["controller"]["state"]["pid"], "mpiexec": next(iter(sets))["pid"]}
            marks = [mark for role, pid in pids.items() if (mark := ProcessMark.of(pid, role))]
            parent = psutil.Process(pids["controller"]).parent()
        except (OSError, ValueError, KeyError, StopIteration, psutil.NoSuchProcess):
            continue  # not whole yet, or not running any more
        owner = ProcessMark.of(parent.pid, "owner") if parent else None
        if name and name not in known and owner and len(marks) == len(pids):
            ranks = sum(engines["n"] for engines in sets)
            Session(name, str(profile_dir), ranks, owner, processes=marks).save()


def sessions() -> list[Session]:
    """Every session of this user on record, oldest first."""
    found = [session for folder in private_folder().iterdir() if (session := Session.load(folder))]
    return sorted(found, key=lambda session: session.started)


def clean_stale() -> list[str]:
    """Remove what labs left that neither run nor start any more; returns what was removed, a line each."""
    removed: list[str] = []
    for session in sessions():
        if not session.running and not session.starting:
            removed += session.remove() or [f"record of lab {session.cluster_id}"]
    return removed
