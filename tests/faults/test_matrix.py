"""Every fault in every kind of traffic: the prompt comes back, variables live, the next sums are right on all ranks.

By default the message sizes take turns, so that each fault meets each size, way and shape. ``LABKIT_FAULTS=all`` tries
all 72 cases, as ``labkit doctor --faults`` does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import labkit
from labkit.cluster import faults
from labkit.cluster.lab import Lab
from tests.conftest import leaves_nothing


@pytest.fixture(autouse=True)
def _clean() -> None:
    """The lab stays from case to case: whether it leaves nothing is seen at the end."""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A lab that goes from one fault to the next."""
    with leaves_nothing(), labkit.start(3) as running:
        faults.prepare(running)
        yield running


def chosen() -> list[faults.Case]:
    """The cases to try."""
    if os.environ.get("LABKIT_FAULTS") == "all":
        return list(faults.cases())
    sizes, ways, shapes = list(faults.BYTES), faults.WAYS, faults.SHAPES
    return [
        faults.Case(fault, sizes[(number + 2 * place + turn) % 3], way, shape)
        for place, way in enumerate(ways)
        for turn, shape in enumerate(shapes)
        for number, fault in enumerate(faults.FAULTS)
    ]


@pytest.mark.parametrize("case", chosen(), ids=str)
def test_the_prompt_comes_back(lab: Lab, case: faults.Case) -> None:
    outcome = faults.try_out(lab, case)
    if outcome.wrong:  # the next case shall not suffer from this one
        lab.restart()
        faults.prepare(lab)
    assert not outcome.wrong
