"""What each running lab has on this machine, on record, so that it can be joined, listed and cleaned up.

A session is a private folder in the temporary directory with one JSON file.  It names every process (by pid and
creation time, so that a reused pid is never mistaken for ours) and every shared-memory segment of one lab.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from labkit.cluster.errors import ClusterError
from labkit.cluster.probe import mapped_segments
from labkit.cluster.processes import ProcessMark, await_end, lives, members, send

__all__ = ["ProcessMark", "Session", "adopt", "clean_stale", "private_folder", "remove_unmapped", "sessions"]

# A shared-memory file of labkit that nobody has mapped for so long is nobody's: making and mapping one takes
# milliseconds.
ORPHAN_S = 5.0


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
    ready
        Whether its start is over; until then even a detached lab ends with its owner.
    segments
        Shared-memory files that its ranks mapped, as paths.
    guard
        The process that clears away what is left when controller, launcher or owner end unexpectedly.
    closing
        The process that is just ending this lab in an orderly way.
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
    ready: bool = False
    guard: ProcessMark | None = None
    closing: ProcessMark | None = None

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
            for role in ("guard", "closing"):
                values[role] = ProcessMark(**values[role]) if values.get(role) else None
            values["processes"] = [ProcessMark(**mark) for mark in values["processes"]]
            return cls(**values)
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def mark(self, role: str) -> ProcessMark | None:
        """The process on record in that role, such as "controller"."""
        return next((mark for mark in self.processes if mark.role == role), None)

    def alive(self) -> list[psutil.Process]:
        """Processes on record that still run (owner and guard are not among them)."""
        return [process for mark in self.processes if (process := mark.process())]

    @property
    def held(self) -> bool:
        """Whether somebody wants this lab: its owner lives, or it is to stay up without one."""
        return (self.detached and self.ready) or self.owner.process() is not None

    @property
    def running(self) -> bool:
        """Whether the lab can still be used: controller and launcher live, and its owner unless it is detached."""
        needed = [mark for mark in (self.mark("controller"), self.mark("mpiexec")) if mark]
        return self.held and bool(needed) and all(mark.process() for mark in needed)

    @property
    def starting(self) -> bool:
        """Whether its owner lives but the controller is not on record yet."""
        return not self.processes and self.owner.process() is not None

    @property
    def stale(self) -> bool:
        """Whether it neither runs nor starts, and nobody is just ending it."""
        return not self.running and not self.starting and (self.closing is None or self.closing.process() is None)

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """While this runs, this process ends the lab: what stops now is no accident that the guard should clear up."""
        outermost = self.closing is None or self.closing.pid != os.getpid()
        if outermost and self.folder.exists():
            guarding = self.guard is not None and self.guard.pid == os.getpid()
            self.closing = self.guard if guarding else ProcessMark.of(os.getpid(), "closing")
            self.save()
        try:
            yield
        finally:
            if outermost:
                self.closing = None
                if self.folder.exists():  # broken off: the rest is the guard's again
                    self.save()

    def remove(self, grace_s: float = 3.0) -> list[str]:
        """End what still runs, and remove every file of this lab.

        Returns what was removed, a line each.  Processes get SIGTERM, and SIGKILL after `grace_s` seconds.
        """
        with self.ending():
            ended = self.end_processes(grace_s)
            removed = [f"process {process.pid}" for process in ended]
            removed += [f"shared memory {segment}" for segment in remove_unmapped(self.segments)]
            for path in self.files():
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
                removed.append(f"file {path}")
            shutil.rmtree(self.folder, ignore_errors=True)
        self.dismiss_guard()
        return removed

    def files(self) -> list[Path]:
        """Files of this lab outside its own folder: ipyparallel's, and those of a launcher that was killed."""
        profile = Path(self.profile_dir)
        found = [path for name in ("security", "log", "pid") for path in (profile / name).glob(f"*{self.cluster_id}*")]
        launcher = self.mark("mpiexec")
        scratch = Path(tempfile.gettempdir()) / f"ompi.{launcher.pid}" if launcher else None
        with contextlib.suppress(FileNotFoundError):
            if scratch and launcher and launcher.process() is None and scratch.lstat().st_uid == os.geteuid():
                found.append(scratch)
        return found

    def end_processes(self, grace_s: float) -> list[psutil.Process]:
        """Terminate, then kill, every process of this lab, and give back those that were there."""
        ended: list[psutil.Process] = []
        watchers = {mark.pid for mark in self.processes if mark.role.startswith("watcher")}
        # Again until none is there: one that is just being started is found a moment later.
        while processes := self.all_processes():
            ended += [process for process in processes if process not in ended]
            for process in processes:
                with contextlib.suppress(OSError):
                    self.segments = sorted({*self.segments, *mapped_segments(process.pid)})
            for process in processes:
                # A watcher has nothing to save; told to end it would first try for seconds to reach its controller.
                send(process, signal.SIGKILL if process.pid in watchers else signal.SIGTERM)
            if not await_end(processes, grace_s):
                for process in processes:
                    send(process, signal.SIGKILL)
                if not await_end(processes, grace_s):
                    break  # not even SIGKILL ends a process that waits for a dead disk
        return ended

    def all_processes(self) -> list[psutil.Process]:
        """What runs of this lab, on record or not."""
        found = members(self.cluster_id)
        for process in self.alive():  # a program whose environment was emptied is still somebody's child
            found.append(process)
            with contextlib.suppress(psutil.NoSuchProcess):
                found += process.children(recursive=True)
        spared = {os.getpid(), self.owner.pid, *({self.guard.pid} if self.guard else ())}
        return [process for process in dict.fromkeys(found) if process.pid not in spared and lives(process)]

    def dismiss_guard(self) -> None:
        """End the guard, unless this process is the guard."""
        process = self.guard.process() if self.guard else None
        if process is not None and process.pid != os.getpid():
            send(process, signal.SIGKILL)
            await_end([process], 1.0)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def remove_unmapped(segments: Iterable[str]) -> list[str]:
    """Remove those shared-memory files that no process has mapped any more."""
    there = {segment for segment in segments if os.path.exists(segment)}
    if not there:
        return []
    mapped: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone by now, or another user's, who cannot map files of yours
            mapped.update(mapped_segments(process.name))
    for segment in there - mapped:
        Path(segment).unlink(missing_ok=True)
    return sorted(there - mapped)


def adopt(profile_dir: Path) -> None:
    """Put clusters of `profile_dir` on record that labkit did not start itself: those of JupyterLab's cluster tab."""
    known = {session.cluster_id for session in sessions() if session.running or session.starting}
    for file in (profile_dir / "security").glob("cluster-*.json"):
        try:
            if file.stat().st_uid != os.geteuid():
                continue  # a lab of somebody who shares the profile
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
            Session(name, str(profile_dir), ranks, owner, processes=marks, ready=True).save()


def sessions() -> list[Session]:
    """Every session of this user on record, oldest first."""
    found = [session for folder in private_folder().iterdir() if (session := Session.load(folder))]
    return sorted(found, key=lambda session: session.started)


def clean_stale() -> list[str]:
    """Remove what labs left that neither run nor start any more; returns what was removed, a line each."""
    removed: list[str] = []
    for session in sessions():
        if session.stale:
            removed += session.remove() or [f"record {session.folder}"]
    for folder in private_folder().glob("labkit-*"):
        # A folder without a record: its owner was killed while it wrote the first one.
        pid = re.fullmatch(r"labkit-(\d+)-\w+", folder.name)
        if pid and not psutil.pid_exists(int(pid[1])) and Session.load(folder) is None:
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(f"folder {folder}")
    return removed + [f"shared memory {segment}" for segment in remove_unmapped(orphans())]


def orphans() -> list[str]:
    """Shared-memory files that labkit's ranks made and did not live to remove: yours, and not new."""
    found = []
    for file in Path("/dev/shm").glob("labkit-*"):
        with contextlib.suppress(FileNotFoundError):
            facts = file.lstat()
            if facts.st_uid == os.geteuid() and time.time() - facts.st_mtime > ORPHAN_S:
                found.append(str(file))
    return found
