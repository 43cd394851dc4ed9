"""What can go wrong when ranks talk. Every message names the rank, the cause and the cure."""

from __future__ import annotations

__all__ = ["ArgumentError", "CommError", "DeadlineError", "MismatchError", "RankDiedError"]


class CommError(RuntimeError):
    """Base class of every error that `labkit.comm` raises by itself."""


class ArgumentError(CommError, ValueError):
    """An argument is wrong on this rank; nothing was sent."""


class MismatchError(CommError):
    """Two sides of one call do not fit: different operation, root, dtype, shape or message length.

    After a mismatch in a collective every rank has this error, no data has moved, and the communicator stays good.
    """


class DeadlineError(CommError, TimeoutError):
    """A wait lasted longer than its `timeout` or the `deadline` around it."""


class RankDiedError(CommError):
    """A call needs a rank whose process has ended.

    Attributes
    ----------
    ranks
        The lost ranks of the call's communicator.
    """

    def __init__(self, message: str, ranks: list[int]) -> None:
        super().__init__(message, ranks)
        self.ranks = ranks

    def __str__(self) -> str:
        return str(self.args[0])
