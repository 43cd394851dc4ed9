"""Errors of the notebook's side.  Each says what is wrong and what cures it."""

from __future__ import annotations

__all__ = ["ClusterError", "MPINotFoundError", "PreflightError", "ProfileNotFoundError", "StartError"]


class ClusterError(RuntimeError):
    """Something about the lab's processes is wrong.

    Parameters
    ----------
    problem
        What is wrong, in a sentence.
    cure
        What to do about it, as a command or a sentence.
    """

    def __init__(self, problem: str, cure: str = "") -> None:
        super().__init__(f"{problem}\nCure: {cure}" if cure else problem)
        self.problem = problem
        self.cure = cure


class MPINotFoundError(ClusterError):
    """No usable MPI launcher."""


class ProfileNotFoundError(ClusterError):
    """No ipyparallel profile of that name."""


class PreflightError(ClusterError):
    """A check before the start failed."""


class StartError(ClusterError):
    """The ranks did not come up."""
