"""What is left of a lab."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from labkit.cluster.probe import mapped_segments
from labkit.cluster.processes import members
from labkit.cluster.sessions import Session, sessions
from tests.conftest import eventually


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def session_of(name: str) -> Session:
    return next(session for session in sessions() if session.cluster_id == name)


class Remains:
    """What there is of one lab; made while it still stands, so that its segments and folders are known."""

    def __init__(self, session: Session) -> None:
        self.name, self.folder = session.cluster_id, session.folder
        launcher = session.mark("mpiexec")
        assert launcher is not None
        self.paths = [self.folder, Path(tempfile.gettempdir()) / f"ompi.{launcher.pid}"]
        self.paths += [Path(path) for process in members(self.name) for path in mapped_segments(process.pid)]
        assert all(path.exists() for path in self.paths)
        assert any(path.parent == Path("/dev/shm") for path in self.paths)
        self.profile, self.guard = Path(session.profile_dir), session.guard

    def list(self) -> list[str]:
        files = [str(path) for path in [*self.paths, *self.profile.rglob(f"*{self.name}*")] if path.exists()]
        guard = ["the guard"] if self.guard and self.guard.process() else []
        return files + guard + [str(process) for process in members(self.name)]

    def gone(self) -> bool:
        eventually(lambda: not self.list())
        assert not self.list()
        return True
