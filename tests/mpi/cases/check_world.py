"""The launcher gives one world of the size asked for."""

from __future__ import annotations

import os

from mpi4py import MPI


def test_the_world_has_the_size_asked_for() -> None:
    assert MPI.COMM_WORLD.size == int(os.environ["LABKIT_TEST_WORLD"])
