"""A real lab for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import labkit
from labkit.cluster.lab import Lab


@pytest.fixture(autouse=True)
def _clean(nothing_left: None) -> None:
    """Every test here leaves nothing behind."""


@pytest.fixture
def lab() -> Iterator[Lab]:
    """A lab of three ranks, stopped afterwards."""
    with labkit.start(3) as running:
        yield running
