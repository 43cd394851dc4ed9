"""Each broken program of a notebook fails its check and says why; each repaired one passes; none hangs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest

from labkit.cluster.cells import CellDeadlineError, CellError, DeadlockError
from labkit.cluster.lab import Lab
from labkit.exercises import Exercise, asynchronous_training, data_and_balance, when_a_rank_dies, when_it_hangs
from tests.lab import solutions_02, solutions_09, solutions_10, solutions_11

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


@dataclass(frozen=True)
class Lesson:
    """A notebook's exercises.

    `shipped` has what is raised, if anything is, and what is said of each program as the notebook has it; `wrong` has a
    version of each that runs through.
    """

    notebook: str
    exercises: Mapping[str, Exercise]
    solutions: Mapping[str, str]
    shipped: Mapping[str, tuple[type[CellError] | None, str]]
    wrong: Mapping[str, str]

    def code_of(self, words: str) -> str:
        """The code for the ranks in the notebook's one cell that has `words`."""
        cells = nbformat.read(NOTEBOOKS / f"{self.notebook}.ipynb", as_version=4).cells
        (found,) = (cell.source for cell in cells if cell.cell_type == "code" and words in cell.source)
        return found.partition("\n")[2]

    def prepare(self, lab: Lab) -> None:
        """Import on the ranks what the notebook does."""
        lines = self.code_of("import check").splitlines()
        lab.run("\n".join(line for line in lines if re.match("(import|from) ", line)), setup=True)


LESSONS = (
    Lesson(
        "02_when_it_hangs",
        when_it_hangs.EXERCISES,
        solutions_02.SOLUTIONS,
        {
            "shift": (DeadlockError, "Cycle 0 → 1 → 2 → 0. Small messages leave at once"),
            "collect": (DeadlockError, "Ranks 1 and 2 finished the cell without a send to rank 0"),
            "total_loss": (DeadlockError, "rank 0 finished the cell without it"),
            "spread": (CellError, "MismatchError: the ranks of 'world' are not in the same call"),
        },
        {
            "shift": "def shift(mine):\n    return mine",
            "collect": "def collect(mine):\n    return [mine] if comm.rank == 0 else None",
            "total_loss": "def total_loss(losses):\n    return sum(losses)",
            "spread": "def spread(x):\n    return x.max() - x.min()",
        },
    ),
    Lesson(
        "09_asynchronous_training",
        asynchronous_training.EXERCISES,
        solutions_09.SOLUTIONS,
        {
            "staleness": (None, "gave [0, 1, 2, 3, … 6 in all], right is [0, 1, 2, 2, … 6 in all]"),
            "elastic": (None, "gave [12.0, 8.0, -3.0], right is [8.0, 8.0, -2.0]"),
            "serve": (DeadlockError, "Rank 1 finished the cell without a send to rank 0"),
        },
        {
            "staleness": "def staleness(arrivals):\n    return [0] * len(arrivals)",
            "elastic": "def elastic(x):\n    return x",
            "serve": "def serve(gradients):\n    return sum(gradients)",
        },
    ),
    Lesson(
        "10_data_and_balance",
        data_and_balance.EXERCISES,
        solutions_10.SOLUTIONS,
        {
            "part": (None, "✗ part, 14 samples: gave [0, 1, 2"),
            "hand_out": (DeadlockError, "Every rank of 'world' must make the call gather_object(dst=0): ranks 1 and 2"),
        },
        {
            "part": "def part(n):\n    return list(range(n))",
            "hand_out": "def hand_out(pieces):\n    return list(range(pieces - 1))",
        },
    ),
    Lesson(
        "11_when_a_rank_dies",
        when_a_rank_dies.EXERCISES,
        solutions_11.SOLUTIONS,
        {
            "my_share": (None, "gave 21, right is 22"),
            "furthest": (DeadlockError, "ranks 0 and 2 finished the cell without it"),
        },
        {
            "my_share": "def my_share(batch):\n    return batch",
            "furthest": "def furthest(updates):\n    return comm.size",
        },
    ),
)
each_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.notebook)
each_exercise = pytest.mark.parametrize(
    ("lesson", "name"),
    [pytest.param(lesson, name, id=name) for lesson in LESSONS for name in lesson.exercises],
)


def said(lab: Lab) -> list[str]:
    assert lab.last is not None
    return [lab.last.text(rank, "stdout") for rank in range(lab.size)]


@each_lesson
def test_the_notebook_has_a_cell_for_every_exercise_and_there_is_a_solution_for_each(lesson: Lesson) -> None:
    assert set(lesson.exercises) == set(lesson.solutions) == set(lesson.shipped) == set(lesson.wrong)
    for name in lesson.exercises:
        assert re.search(rf'def {name}\([^)]+\):\n    """', lesson.code_of(f"check({name})"))


@each_exercise
def test_a_program_as_shipped_fails_and_the_message_says_why(lab: Lab, lesson: Lesson, name: str) -> None:
    lesson.prepare(lab)
    error, words = lesson.shipped[name]
    code = lesson.code_of(f"check({name})")
    if error is None:
        lab.run(code, show=False, deadline=30)
        assert words in "".join(said(lab))
    else:
        with pytest.raises(error) as caught:
            lab.run(code, show=False, deadline=30)
        assert not isinstance(caught.value, CellDeadlineError)
        assert not caught.value.stuck
        assert words in str(caught.value)
        if name == "spread":
            assert caught.value.first is not None
            assert "labkit/exercises" not in caught.value.first.traceback
    assert any(text.count("✓") < len(lesson.exercises[name].cases) for text in said(lab))


@each_exercise
def test_a_repaired_program_passes_on_every_rank(lab: Lab, lesson: Lesson, name: str) -> None:
    lesson.prepare(lab)
    lab.run(f"{lesson.solutions[name]}\ncheck({name})", show=False, deadline=60)
    right = "".join(f"✓ {name}, {case.words}: right\n" for case in lesson.exercises[name].cases)
    assert said(lab) == [right] * 3


@each_exercise
def test_a_program_that_runs_through_with_a_wrong_result_is_told_so(lab: Lab, lesson: Lesson, name: str) -> None:
    lesson.prepare(lab)
    lab.run(f"{lesson.wrong[name]}\ncheck({name})", show=False, deadline=60)
    text = "".join(said(lab))
    assert re.search(rf"✗ {name}, [^:]+: gave .+, right is .+\. {re.escape(lesson.exercises[name].hint)}", text)


@each_lesson
def test_a_check_of_something_else_names_the_exercises(lab: Lab, lesson: Lesson) -> None:
    lesson.prepare(lab)
    with pytest.raises(
        CellError, match=rf"check\(other\): there is no such exercise, only {next(iter(lesson.exercises))}, "
    ):
        lab.run("def other(x): pass\ncheck(other)", show=False)
