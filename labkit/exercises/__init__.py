"""Programs to write or repair in the notebooks, and checks that say whether they are right.

Each notebook that has some has a module here, whose ``check`` a student calls in a `%%px` cell: it runs on the ranks
and needs nothing of the notebook's side. Solutions are no part of labkit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labkit import comm
from labkit.comm import ArgumentError

__all__ = ["Case", "Exercise", "check"]

SHOWN = 4
"""Elements of a long result that are shown."""


@dataclass(frozen=True)
class Case:
    """A call whose right result is known.

    Attributes
    ----------
    words
        What is special about it, for the message.
    argument, right
        What the program gets on a rank and must give there, from the rank's number and the number of ranks.
    """

    words: str
    argument: Callable[[int, int], Any]
    right: Callable[[int, int], Any]


@dataclass(frozen=True)
class Exercise:
    """A program to repair: the calls that it must pass, and what to say where it gives a wrong result."""

    cases: Sequence[Case]
    hint: str


def check(program: Callable[[Any], Any], exercises: Mapping[str, Exercise]) -> None:
    """Call `program` on this rank and print for each case whether its result is right; every rank must do so.

    The check sends no message of its own: a rank that comes through goes on, and those that do not are seen waiting
    where they wait in the program.

    Parameters
    ----------
    program
        A function of one argument; its name tells which exercise it is.
    exercises
        By the programs' names.

    Raises
    ------
    ArgumentError
        When no exercise has that name.
    """
    name = getattr(program, "__name__", repr(program))
    if name not in exercises:
        raise ArgumentError(f"check({name}): there is no such exercise, only {', '.join(exercises)}. Keep the name.")
    exercise, rank, size = exercises[name], comm.rank, comm.size
    for case in exercise.cases:
        result, right = plain(program(case.argument(rank, size))), plain(case.right(rank, size))
        if result != right:
            print(f"✗ {name}, {case.words}: gave {short(result)}, right is {short(right)}. {exercise.hint}")
            return
        print(f"✓ {name}, {case.words}: right", flush=True)


def plain(value: Any) -> Any:
    """Tensors and arrays as lists; one element alone as a number."""
    listed = value.tolist() if hasattr(value, "tolist") else value
    return listed[0] if isinstance(listed, list) and len(listed) == 1 else listed


def short(value: Any) -> str:
    """A value as text, long lists cut off."""
    if isinstance(value, list) and len(value) > SHOWN:
        return f"[{', '.join(map(str, value[:SHOWN]))}, … {len(value):,} in all]"
    return str(value)
