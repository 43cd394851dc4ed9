"""Where each rank is, as `lab.where()` shows it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

__all__ = ["Stacks"]

MACHINERY = re.compile(
    r'File "[^"]*/(ipykernel|ipyparallel|IPython|traitlets|tornado|asyncio|labkit/cluster|labkit/comm)/|File "<frozen'
)

CELL = re.compile(r'File "[^"]*(?:/ipykernel_|<ipython-input)[^"]*"')


class Stacks(dict[int, list[str]]):
    """Stack lines by rank, outermost frame first; a rank that does not answer has none."""

    def __init__(self, stacks: Mapping[int, Sequence[str] | None]) -> None:
        super().__init__({rank: theirs(lines or []) for rank, lines in stacks.items()})
        self._silent = {rank for rank, lines in stacks.items() if lines is None}

    def __repr__(self) -> str:
        lines = []
        for rank, stack in self.items():
            if rank in self._silent:
                stack = ["  does not answer: it is stopped, gone, or in C code that lets nothing else run"]
            lines += [f"rank {rank}", *(stack or ["  at its prompt"])]
        return "\n".join(lines)


def theirs(lines: Sequence[str]) -> list[str]:
    """The user's part of a stack: from the cell on, without what runs cells and what labkit's own calls are made of."""
    own = [line.rstrip("\n") for line in lines if not MACHINERY.search(line)]
    start = next((number for number, line in enumerate(own) if "ipykernel_" in line or "<ipython-input" in line), None)
    return [CELL.sub("cell", line) for line in own[start:]] if start is not None else []
