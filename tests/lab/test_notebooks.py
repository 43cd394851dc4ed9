"""The notebooks run from top to bottom, show what they claim, and leave nothing."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from labkit import report

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_from_top_to_bottom(path: Path, tmp_path: Path) -> None:
    html = run(path, tmp_path)
    assert html.count('<div class="chart">') >= 1, "a chart"
    if path.stem == "06_synchronous_sgd":
        found = re.search(r"test accuracy ([\d.]+)%, replicas differ by 0\b", html)
        assert found, "the training's result"
        # Real MNIST where it is there; the small set of digits otherwise, which is not as easily learnt.
        assert float(found[1]) >= (97 if "mnist: 60,000" in html else 90)


@pytest.mark.timeout(400)
def test_training_runs_where_there_is_no_data_folder(tmp_path: Path) -> None:
    path = next(path for path in NOTEBOOKS if path.stem == "06_synchronous_sgd")
    html = run(path, tmp_path, LABKIT_DATA="", XDG_CACHE_HOME=str(tmp_path))
    found = re.search(r"(mnist|digits): [\d,]+ training and [\d,]+ test images", html)
    assert found, "the notebook says what it trained on"
    assert "replicas differ by 0" in html


def run(path: Path, out: Path, **environment: str) -> str:
    """Execute a notebook and give its report."""
    (result,) = report.run([path], out, environment=environment)
    assert result.ok, result.error
    return result.path.read_text()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stored_without_outputs_and_short_enough_to_stay(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert len(notebook.cells) <= 27
    assert "labkit.start(" in code[0].source
    assert code[-1].source == "lab.stop()"
