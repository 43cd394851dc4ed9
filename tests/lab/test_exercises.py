"""Each broken program of a notebook fails its check and says why; each repaired one passes; none hangs."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from labkit.cluster.cells import CellDeadlineError, CellError, DeadlockError
from labkit.cluster.lab import Lab
from labkit.exercises.when_it_hangs import EXERCISES
from tests.lab.solutions_02 import SOLUTIONS

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "02_when_it_hangs.ipynb"

# What the message must say of each, as shipped.
MESSAGES = {
    "shift": (DeadlockError, "Cycle 0 → 1 → 2 → 0. Small messages leave at once"),
    "collect": (DeadlockError, "Ranks 1 and 2 finished the cell without a send to rank 0"),
    "total_loss": (DeadlockError, "rank 0 finished the cell without it"),
    "spread": (CellError, "MismatchError: the ranks of 'world' are not in the same call"),
}
WRONG = {
    "shift": "def shift(mine):\n    return mine",
    "collect": "def collect(mine):\n    return [mine] if comm.rank == 0 else None",
    "total_loss": "def total_loss(losses):\n    return sum(losses)",
    "spread": "def spread(x):\n    return x.max() - x.min()",
}


@pytest.fixture(autouse=True)
def _prepared(lab: Lab) -> None:
    lab.run(code_of("%%px --setup"), setup=True)


def code_of(*words: str) -> str:
    """The code for the ranks in the notebook's one cell that has all `words`."""
    cells = [cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    (found,) = (cell for cell in cells if all(word in cell for word in words))
    return found.partition("\n")[2]


def said(lab: Lab) -> list[str]:
    assert lab.last is not None
    return [lab.last.text(rank, "stdout") for rank in range(lab.size)]


def test_the_notebook_has_a_cell_for_every_exercise_and_there_is_a_solution_for_each() -> None:
    assert set(EXERCISES) == set(SOLUTIONS) == set(MESSAGES) == set(WRONG)
    for name in EXERCISES:
        assert re.search(rf'def {name}\(\w+\):\n    """', code_of(f"check({name})"))


@pytest.mark.parametrize("name", EXERCISES)
def test_a_program_as_shipped_fails_and_the_message_says_why(lab: Lab, name: str) -> None:
    error, words = MESSAGES[name]
    with pytest.raises(error) as caught:
        lab.run(code_of(f"check({name})"), show=False, deadline=30)
    assert not isinstance(caught.value, CellDeadlineError)
    assert not caught.value.stuck
    assert words in str(caught.value)
    if name == "spread":
        assert caught.value.first is not None
        assert "labkit/exercises" not in caught.value.first.traceback
    assert any(text.count("✓") < len(EXERCISES[name].cases) for text in said(lab))


@pytest.mark.parametrize("name", EXERCISES)
def test_a_repaired_program_passes_on_every_rank(lab: Lab, name: str) -> None:
    lab.run(f"{SOLUTIONS[name]}\ncheck({name})", show=False, deadline=60)
    right = "".join(f"✓ {name}, {case.words}: right\n" for case in EXERCISES[name].cases)
    assert said(lab) == [right] * 3


@pytest.mark.parametrize("name", EXERCISES)
def test_a_program_that_runs_through_with_a_wrong_result_is_told_so(lab: Lab, name: str) -> None:
    lab.run(f"{WRONG[name]}\ncheck({name})", show=False, deadline=60)
    text = "".join(said(lab))
    assert re.search(rf"✗ {name}, [^:]+: gave .+, right is .+\. {re.escape(EXERCISES[name].hint)}", text)


def test_a_check_of_something_else_names_the_exercises(lab: Lab) -> None:
    with pytest.raises(CellError, match=r"check\(other\): there is no such exercise, only shift, collect"):
        lab.run("def other(x): pass\ncheck(other)", show=False)
