"""The project's own rules: one list of dependencies, imports that keep to the house, a light import."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

CONDA_NAMES = {"torch": "pytorch"}


def bounds(requirements: list[str]) -> dict[str, str]:
    """Name and lower bound of each requirement."""
    found = {}
    for requirement in requirements:
        match = re.fullmatch(r"([\w-]+)>=([\d.]+)", requirement)
        assert match, f"{requirement!r} has no lower bound"
        found[match[1]] = match[2]
    return found


def test_environment_yml_lists_the_same_dependencies_with_the_same_bounds(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    ours = {CONDA_NAMES.get(name, name): bound for name, bound in bounds(project["dependencies"]).items()}
    conda = yaml.safe_load((root / "environment.yml").read_text())
    theirs = bounds([entry for entry in conda["dependencies"] if entry != "pip"])
    assert theirs.pop("python") == project["requires-python"].removeprefix(">=")
    assert theirs == ours
    assert conda["channels"] == ["conda-forge", "nodefaults"]


def test_the_lock_has_hashes_for_every_package_and_no_address(root: Path) -> None:
    lock = (root / "requirements.lock").read_text()
    packages = re.findall(r"^([\w.-]+)==", lock, re.MULTILINE)
    blocks = re.split(r"^(?=[\w.-]+==)", lock, flags=re.MULTILINE)[1:]
    assert len(packages) == len(blocks) > 100
    assert all("--hash=sha256:" in block for block in blocks)
    assert "://" not in lock
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    wanted = bounds(project["dependencies"] + project["optional-dependencies"]["test"])
    assert set(wanted) <= set(packages)


def test_importing_labkit_is_light() -> None:
    heavy = ("torch", "plotly", "ipyparallel", "mpi4py", "numpy", "IPython")
    program = f"import sys, labkit, labkit.telemetry.facts; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    loaded = done.stdout.strip()
    assert "torch" not in loaded
    assert "plotly" not in loaded
    assert "ipyparallel" not in loaded


@pytest.mark.parametrize(
    "command", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"], ["lint-imports"]]
)
def test_the_code_keeps_to_its_rules(root: Path, command: list[str]) -> None:
    tool = Path(sys.executable).parent / command[0]
    done = subprocess.run([tool, *command[1:]], cwd=root, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
