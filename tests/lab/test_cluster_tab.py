"""JupyterLab's cluster tab, by the requests that it makes: it lists our profile, and starts one MPI world from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import labkit
from labkit.cluster.profiles import profile_folder
from labkit.cluster.sessions import clean_stale
from tests.conftest import eventually

PORT = 18917


def ask(path: str, method: str = "GET", body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", method=method, data=data)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read() or b"null")


def answers() -> bool:
    try:
        return bool(ask("/api"))
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture
def jupyter(tmp_path: Path) -> Iterator[None]:
    """A Jupyter server as `make lab` starts it, without JupyterLab's pages."""
    options = ["--no-browser", "--ip=127.0.0.1", f"--port={PORT}", "--ServerApp.port_retries=0", "--allow-root"]
    options += ["--IdentityProvider.token=", "--ServerApp.disable_check_xsrf=True", f"--ServerApp.root_dir={tmp_path}"]
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyter_server", *options],
        env=os.environ | {"IPYTHONDIR": str(profile_folder("local").parent)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert eventually(answers, 30)
        yield
    finally:
        server.terminate()
        server.wait(20)


def test_the_tab_starts_our_profile_as_one_world_and_labkit_joins_it(jupyter: None) -> None:
    clusters = "/ipyparallel/clusters"
    assert [model["engines"]["class"] for model in ask(clusters) if model["cluster"]["profile"] == "local"] == [
        "labkit"
    ]
    name = ask(clusters, "POST", {"profile": "local", "n": 2, "cluster_id": "from-the-tab"})["id"]
    ask(f"{clusters}/{name}", "POST", {})
    try:
        lab = labkit.connect("from-the-tab")
        cell = lab.run("print(mpi_rank, mpi_size)", show=False)
        assert [cell.text(rank, "stdout") for rank in range(2)] == ["0 2\n", "1 2\n"]
        lab.disconnect()
    finally:
        ask(f"{clusters}/{name}", "DELETE")
        clean_stale()
