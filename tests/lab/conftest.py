"""A real lab for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import labkit
from labkit.cluster.current import become
from labkit.cluster.lab import Lab
from tests.conftest import leaves_nothing

FORGET = """
globals().setdefault("_names", {*globals(), "_names"})
for _name in {*globals()} - _names: del globals()[_name]
"""


@pytest.fixture(autouse=True, scope="module")
def _clean() -> Iterator[None]:
    """Every module here leaves nothing behind."""
    with leaves_nothing():
        yield


@pytest.fixture(scope="module")
def _labs() -> Iterator[list[Lab]]:
    """The lab that a module's tests have one after the other, while it is as good as new."""
    labs: list[Lab] = []
    yield labs
    for lab in labs:
        lab.stop()


@pytest.fixture
def lab(_labs: list[Lab]) -> Lab:
    """A lab of three ranks that know no variables."""
    if _labs and not as_new(_labs[0]):
        _labs.pop().stop()
    if not _labs:
        _labs.append(labkit.start(3))
    lab = _labs[0]
    become(lab)
    lab.run(FORGET)
    lab.deadline, lab.last, lab.setup = None, None, []
    return lab


def as_new(lab: Lab) -> bool:
    """Whether nothing but variables tells that tests have used it."""
    whole = lab.running and lab.size == 3 and not lab.after_cell and lab._collector is None
    return whole and [row.state for row in lab.status()] == ["ready"] * 3
