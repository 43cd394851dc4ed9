"""The notebooks run from top to bottom, show what they claim, and leave nothing.

``LABKIT_NOTEBOOKS=all`` runs the two with the longest trainings as well, which ``make report`` runs in any case.
"""

from __future__ import annotations

import os
import re
from html import unescape
from pathlib import Path

import nbformat
import pytest

from labkit import report

LONGEST = () if os.environ.get("LABKIT_NOTEBOOKS") == "all" else ("09_asynchronous_training", "10_data_and_balance")
EVERY = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
NOTEBOOKS = [path for path in EVERY if path.stem not in LONGEST]

# What the cells of notebook 02 must say, in their order.
WHEN_IT_HANGS = (
    "DeadlockError: ranks 0 and 1 cannot go on.",
    "rank 0  recv(src=1, tag=any, float32 × 3)   cell line 2",
    "Cycle 0 → 1 → 0. Let one side send first, or use sendrecv().",
    "rank 3  recv(source=0, tag=any)   cell line 1",
    "Cycle 0 → 1 → 2 → 3 → 0. Let one of them send first",
    "Cycle 0 → 1 → 0. Small messages leave at once, but large ones wait for their receiver",
    "Every rank of 'world' must make the call barrier(): rank 3 finished the cell without it.",
    "rank 2 failed first:",
    "ZeroDivisionError",
    "rank 1  all_reduce(sum, float32, shape (3,))",
    "barrier(), cell line 3",
    "DeadlineError: the cell was not done after 2 s.",
    "rank 3 is still computing (cell line",
    "RankDiedError: the process of rank 2 is gone.",
    "labkit: rank 2 started again",
    "✓ shift, 8 numbers: right",
    "Ranks 1 to 3 finished the cell without a send to rank 0",
    "rank 0 finished the cell without it.",
    "rank 0  all_reduce(max, float32, shape (1,))",
)

# What the table of notebook 09 must have.
METHODS = ("synchronous", "averaging", "backup_workers", "downpour", "downpour, τ = 5", "easgd, τ = 5", "gem")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_from_top_to_bottom(path: Path, tmp_path: Path) -> None:
    # As a newcomer has it: no data folder, and nothing downloaded before.
    html = run(path, tmp_path, LABKIT_DATA="", XDG_CACHE_HOME=str(tmp_path))
    assert html.count('<div class="chart">') >= 1, "a chart"
    if path.stem == "02_when_it_hangs":
        check_what_hung(unescape(html))
    if path.stem == "06_synchronous_sgd":
        found = re.search(r"test accuracy ([\d.]+)%, replicas differ by 0\b", html)
        assert found, "the training's result"
        # Real MNIST where it can be had; the small set of digits otherwise, which is not as easily learnt.
        assert float(found[1]) >= (97 if "mnist: 60,000" in html else 90)
        assert re.search(r"(mnist|digits): [\d,]+ training and [\d,]+ test images", html), "what it trained on"
    if path.stem == "09_asynchronous_training":
        check_what_it_cost(unescape(html))
    if path.stem == "10_data_and_balance":
        check_who_took_what(unescape(html))
    if path.stem == "11_when_a_rank_dies":
        check_what_was_lost(unescape(html))


def check_what_it_cost(html: str) -> None:
    """Notebook 09 shows every method, and that older gradients teach less."""
    for method in METHODS:
        assert html.count(f"<td>{method}</td>") == 1, method
    losses = [float(loss) for loss in re.findall(r"\d+ updates old: ([\d.]+)\n", html)]
    assert len(losses) == 4 and losses[0] == min(losses)
    assert re.search(r"samples that backup_workers dropped: \d+", html)
    for words in ("✗ staleness", "✗ elastic", "Rank 1 finished the cell without a send to rank 0"):
        assert words in html, words


def check_who_took_what(html: str) -> None:
    """Notebook 10 has every sample once, by each way, and names the damaged file."""
    assert "all ranks together: each sample 1 to 1 times" in html
    by_rank = [list(map(int, each.split(", "))) for each in re.findall(r"samples[a-z ]* \[([\d, ]+)\]", html)]
    whole, larger = [sum(each) for each in by_rank if len(each) == 4], [sum(each) for each in by_rank if len(each) == 3]
    assert whole == [6000] * 2 + [1501] * 5 and larger == [6000] * 2
    equal, queue = (each for each in by_rank if len(each) == 3)
    assert equal == [2000] * 3 and queue != equal
    assert "every rank says: part5.npz is damaged" in html
    assert re.search(r"batch size \d+: ", html)
    for words in ("✗ part, 14 samples", "Every rank of 'world' must make the call gather_object(dst=0)"):
        assert words in html, words


def check_what_was_lost(html: str) -> None:
    """Notebook 11: plain MPI ends all ranks; a checkpoint brings every bit back; elastic training loses no sample."""
    assert "ranks that came to the end: 0\n" in html
    differences = re.findall(r"largest difference of a weight from the undisturbed run: ([\d.e-]+)", html)
    assert differences[:2] == ["0", "0"] and len(differences) == 3 and float(differences[2]) < 1e-4
    assert re.search(r"refused: \S+latest\.pt is cut short", html)
    assert "Training goes on from previous.pt, after epoch 2, step 0." in html
    made = re.search(r"updates made by ranks 0 to 3: (\d+) (\d+) (\d+) (\d+)\b", html)
    assert made and made[1] == made[2] == made[4] and int(made[3]) < int(made[1])
    assert re.search(r"in 2 epochs each of 1,500 samples: at least 2, at most 2 times", html)
    accuracies = re.findall(r"test accuracy after epoch 2, [^:]+: ([\d.]+)%", html)
    assert len(accuracies) == 2 and abs(float(accuracies[0]) - float(accuracies[1])) < 1
    assert re.search(r"replicas differ by 0, updates: \[(\d+), \1, \1, \1\]", html)


def check_what_hung(html: str) -> None:
    """Every fault of notebook 02 is named, drawn, and over."""
    for words in WHEN_IT_HANGS:
        assert words in html, words
    assert len(re.findall(r"stuck from [\d,]+ bytes on", html)) == 1, "the size that was measured"
    assert html.count("Who waits for whom") == 7, "a picture for each proof"
    rows = re.findall(r"rank (\d) │ process (\d+), \[7\.0, 7\.0, 7\.0\], sum 4\b", html)
    assert [rank for rank, _ in rows] == list("0123")
    began = re.findall(r"<td[^>]*>([0-3])</td><td[^>]*>[^<]*</td><td[^>]*>(\d+)</td>", html)[:4]
    assert [new == old for new, old in zip(rows, began, strict=True)] == [True, True, False, True]


def run(path: Path, out: Path, **environment: str) -> str:
    """Execute a notebook and give its report."""
    (result,) = report.run([path], out, environment=environment)
    assert result.ok, result.error
    return result.path.read_text()


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_it_is_stored_without_outputs_and_short_enough_to_stay(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert len(notebook.cells) <= 27
    assert "labkit.start(" in code[0].source
    assert code[-1].source == "lab.stop()"
