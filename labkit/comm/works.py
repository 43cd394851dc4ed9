"""What a call of torch.distributed returns: something to wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from labkit.comm.requests import Request

__all__ = ["Done", "Pending", "Pieces", "Together", "seconds"]


def seconds(timeout: Any) -> float | None:
    """A timeout of torch.distributed (a timedelta, negative: not given) in seconds, or None."""
    given = timeout.total_seconds() if isinstance(timeout, timedelta) else None
    return given if given is not None and given >= 0 else None


class Done(dist.Work):
    """A call that is over when it returns.

    Parameters
    ----------
    result
        The tensors it has filled.
    """

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result

    def is_completed(self) -> bool:
        """Yes."""
        return True

    def is_success(self) -> bool:
        """Yes: a call that fails raises its error at once."""
        return True

    def exception(self) -> None:
        """None."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Nothing to wait for."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def result(self) -> Any:
        """The tensors."""
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that holds the tensors."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        return future


class Pending(dist.Work):
    """A message under way.

    Parameters
    ----------
    request
        labkit's.
    tensors
        What it moves.
    timeout
        Seconds that `wait` has if it is told nothing else.
    """

    def __init__(self, request: Request, tensors: list[torch.Tensor], timeout: float | None) -> None:
        super().__init__()
        self._request, self._tensors, self._timeout = request, tensors, timeout
        self._source = -1
        self._error: Exception | None = None

    def is_completed(self) -> bool:
        """Whether it is over; asking lets MPI make progress."""
        try:
            return self._request.test()
        except RuntimeError as error:
            self._error = error
            return True

    def is_success(self) -> bool:
        """Whether it is over and went well."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """What went wrong."""
        return self._error

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is over."""
        given = seconds(timeout)
        message = self._request.wait(given or self._timeout)
        if message is not None:
            self._source = message.src
        return True

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """The tensors."""
        return self._tensors

    def source_rank(self) -> int:
        """Who sent the message."""
        self.wait()
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that holds the tensors; waits for them."""
        self.wait()
        return Done(self._tensors).get_future()


class Together(Done):
    """Several messages, for one wait.

    Parameters
    ----------
    works
        What is waited for.
    """

    def __init__(self, works: Sequence[Pending | Pieces]) -> None:
        super().__init__([tensor for work in works for tensor in work.result()])
        self._works = works

    def is_completed(self) -> bool:
        """Whether all are over."""
        return all([work.is_completed() for work in self._works])

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all of them."""
        return all([work.wait(timeout) for work in self._works])

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that holds the tensors; waits for them."""
        self.wait()
        return super().get_future()


class Pieces(Together):
    """One message that goes in several.

    Parameters
    ----------
    works
        Of the pieces.
    tensors
        What they make up.
    finish
        Called once, when all pieces are here.
    """

    def __init__(
        self, works: list[Pending], tensors: list[torch.Tensor], finish: Callable[[], None] | None = None
    ) -> None:
        super().__init__(works)
        self._result, self._first, self._finish = tensors, works[0], finish

    def is_completed(self) -> bool:
        """Whether all are over."""
        over = super().is_completed()
        if over and self.exception() is None:
            self._end()
        return over

    def is_success(self) -> bool:
        """Whether all are over and went well."""
        return all([work.is_success() for work in self._works])

    def exception(self) -> Any:
        """What went wrong."""
        return next((work.exception() for work in self._works if work.exception() is not None), None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all of them."""
        super().wait(timeout)
        self._end()
        return True

    def source_rank(self) -> int:
        """Who sent the message."""
        return self._first.source_rank()

    _source_rank = source_rank

    def _end(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
