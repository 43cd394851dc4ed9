"""Two users with labs on one machine do not disturb each other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import labkit
from labkit.cluster.processes import members
from labkit.cluster.sessions import clean_stale, sessions
from tests.conftest import eventually
from tests.faults.remains import line

OTHER_USER = 65534
BE_OTHER = ["setpriv", f"--reuid={OTHER_USER}", f"--regid={OTHER_USER}", "--clear-groups"]

GUEST = """
import json, sys
import labkit
from labkit.cluster.sessions import clean_stale
from labkit.cluster.status import machine_status
lab = labkit.start(2)
print(json.dumps([[one["id"] for one in machine_status()], clean_stale(), lab.session.cluster_id]), flush=True)
sys.stdin.readline()
lab.push(mine=3)
print(json.dumps(lab.pull("mine")), flush=True)
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder of the other user's."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("only root can start a program as another user (by setpriv)")
    folder = Path(tempfile.mkdtemp())  # not pytest's own, into which another user cannot look
    os.chown(folder, OTHER_USER, OTHER_USER)
    yield folder
    shutil.rmtree(folder)
    shutil.rmtree(Path(tempfile.gettempdir()) / f"labkit-{OTHER_USER}", ignore_errors=True)


@pytest.fixture
def settings(home: Path) -> dict[str, str]:
    """The other user's environment: the same MPI and the same temporary folder."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"HOME": str(home), "PATH": path}


@pytest.fixture
def python(home: Path, settings: dict[str, str]) -> str:
    """An interpreter that the other user can run, and that finds our packages."""
    # Ours may lie where the other user cannot look; the system's of the same version will do.
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = f"{sysconfig.get_path('purelib')}\n{Path(__file__).resolve().parents[2]}\n"
    for base in (os.path.realpath(sys.executable), f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        if os.path.exists(base):
            venv = home / base.replace("/", "_")
            subprocess.run([base, "-m", "venv", "--without-pip", venv], check=True, timeout=60)
            (venv / "lib" / version / "site-packages" / "labkit.pth").write_text(packages)
            python = str(venv / "bin" / "python")
            # By a shell: setpriv itself still has root's rights when it looks for the program.
            shell = [*BE_OTHER, "sh", "-c", f"{python} -c 'import labkit, psutil, zmq'"]
            if (
                subprocess.run(shell, cwd="/", env=settings, capture_output=True, timeout=60, check=False).returncode
                == 0
            ):
                return python
    pytest.skip(f"no {version} that another user can run")


def test_each_sees_and_cleans_only_their_own(home: Path, settings: dict[str, str], python: str) -> None:
    with labkit.start(2) as lab:
        other = subprocess.Popen(
            [*BE_OTHER, python, "-c", GUEST],
            cwd=home,
            env=settings,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        seen, cleaned, name = json.loads(line(other))
        assert seen == [name]
        assert not cleaned
        assert name not in [session.cluster_id for session in sessions()]
        assert not clean_stale()
        lab.push(mine=4)
        assert lab.pull("mine") == [4, 4]
        said, _ = other.communicate("go on\n", timeout=60)
        assert json.loads(said) == [3, 3]
        assert other.returncode == 0
        assert eventually(lambda: not members(name))
        lab.push(mine=5)
        assert lab.pull("mine") == [5, 5]
