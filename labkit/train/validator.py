"""Who tests the model after an epoch: all ranks, rank 0 while the others wait, or a thread beside the training."""

from __future__ import annotations

import contextlib
import copy
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labkit.data import Tensors

from .history import EpochRow
from .replicas import TrainError
from .settings import SettingError
from .transport import Alone, Transport
from .validation import validate_shared

__all__ = ["TestThread", "Validator"]

BACKLOG = 1
"""Copies of the weights that wait for the thread. A training that runs further ahead waits."""

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Tested:
    """A test's result, or why there is none."""

    epoch: int
    loss: float
    accuracy: float
    error: BaseException | None = None


class Validator:
    """Tests a run's model in one of the `validation.WAYS`.

    `begin` is called before anything watches the model's gradients.

    Parameters
    ----------
    way
        One of `validation.WAYS`; False: never. True: ``"distributed"`` where all ranks step together, ``"inline"`` for
        a master.
    model
        This rank's replica.
    samples
        The test set, on the model's device.
    loss
        Returns the mean loss of a batch.
    over
        What connects the ranks.
    together
        Whether all ranks step together, and so call `test` and `collect` together. Otherwise rank 0, the master, calls
        them alone.

    Raises
    ------
    SettingError
        If a master cannot test that way.
    """

    def __init__(
        self, way: bool | str, model: nn.Module, samples: Tensors, loss: Loss, over: Transport, together: bool
    ) -> None:
        if way == "distributed" and not together:
            raise SettingError(
                'validate="distributed" needs all ranks at the end of an epoch, and here workers step on their own: '
                'use "inline" or "thread"'
            )
        self.way = ("distributed" if together else "inline") if way is True else way
        self._model, self._samples, self._loss, self._over, self._together = model, samples, loss, over, together
        self._thread: TestThread | None = None

    def begin(self) -> None:
        """Start the thread, if there is one."""
        if self.way == "thread" and self._over.rank == 0:
            self._thread = TestThread(self._model, self._samples, self._loss)

    def test(self, row: EpochRow, own: Callable[[], tuple[float, float]] | None = None) -> None:
        """Fill the test's loss and accuracy into `row`, now, or by a later `collect`.

        Parameters
        ----------
        row
            Of the epoch that has ended.
        own
            How the method tests, on all ranks, if it has a way of its own: then there is no other.
        """
        if not self.way:
            return
        if own is not None:
            if self.way != "distributed":
                raise SettingError(f"validate={self.way!r}: this method tests on all ranks, give validate=True")
            row.test_loss, row.test_accuracy = own()
        elif self.way == "distributed":
            row.test_loss, row.test_accuracy = validate_shared(self._model, self._samples, self._loss, self._over)
        elif self.way == "inline":
            self._test_inline(row)
        elif self._thread is not None:
            self._thread.submit(row.epoch, self._model)

    def collect(self, rows: list[EpochRow], outstanding: int | None = None) -> list[EpochRow]:
        """Fill in what the thread has found since; return the rows that it was for, the same on all ranks.

        Parameters
        ----------
        rows
            The epochs so far.
        outstanding
            Wait until no more than so many tests are under way; default: do not wait.

        Raises
        ------
        TrainError
            On the other ranks, when the thread failed; rank 0 raises the error itself.
        """
        if self.way != "thread":
            return []
        found = self._thread.collect(outstanding) if self._thread else []
        failed = next((tested for tested in found if tested.error is not None), None)
        told = [(tested.epoch, tested.loss, tested.accuracy) for tested in found], repr(failed.error) if failed else ""
        results, problem = self._over.all_gather_object(told)[0] if self._together else told
        if failed is not None and failed.error is not None:
            failed.error.add_note(f"Rank 0's validation thread raised this in the test after epoch {failed.epoch}.")
            raise failed.error
        if problem:
            raise TrainError(f"rank 0: the validation thread failed: {problem}")
        by_epoch = {row.epoch: row for row in rows}
        for epoch, loss, accuracy in results:
            by_epoch[epoch].test_loss, by_epoch[epoch].test_accuracy = loss, accuracy
        return [by_epoch[epoch] for epoch, *_ in results]

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.close()

    def _test_inline(self, row: EpochRow) -> None:
        device = next(self._model.parameters()).device
        answer = torch.zeros(2, dtype=torch.float64, device=device)
        if self._over.rank == 0:
            found = validate_shared(self._model, self._samples, self._loss, Alone())
            answer[:] = torch.tensor(found, dtype=torch.float64)
        if self._together:
            self._over.broadcast(answer)
        row.test_loss, row.test_accuracy = answer.tolist()


class TestThread:
    """A thread that tests copies of a model, one after the other. torch's kernels leave Python to the others.

    Parameters
    ----------
    model
        Copied at once; the thread computes with the copy.
    samples, loss
        As for `Validator`.
    """

    __test__ = False  # no test of pytest's

    def __init__(self, model: nn.Module, samples: Tensors, loss: Loss) -> None:
        self._model = copy.deepcopy(model)
        self._samples, self._loss = samples, loss
        self._threads = torch.get_num_threads()
        self._jobs: queue.Queue[tuple[int, dict[str, Tensor]] | None] = queue.Queue(BACKLOG)
        self._done: queue.SimpleQueue[Tested] = queue.SimpleQueue()
        self._outstanding = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="labkit validation", daemon=True)
        self._thread.start()

    def submit(self, epoch: int, model: nn.Module) -> None:
        """Have the weights tested that `model` has now; waits while `BACKLOG` others wait."""
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        self._outstanding += 1
        self._jobs.put((epoch, weights))

    def collect(self, outstanding: int | None = None) -> list[Tested]:
        """Return what was found since the last call; waits until no more than `outstanding` tests are under way."""
        found = []
        while self._outstanding:
            wait = outstanding is not None and self._outstanding > outstanding
            try:
                found.append(self._done.get(block=wait))
            except queue.Empty:
                break
            self._outstanding -= 1
        return found

    def close(self) -> None:
        """End the thread, after the batch that it is at."""
        self._closing.set()
        with contextlib.suppress(queue.Full):  # then it comes to itself at the next job
            self._jobs.put_nowait(None)
        self._thread.join()

    def _work(self) -> None:
        torch.set_num_threads(self._threads)  # a new thread would take all cores
        while (job := self._jobs.get()) is not None and not self._closing.is_set():
            epoch, weights = job
            try:
                self._model.load_state_dict(weights)
                loss, accuracy = validate_shared(self._model, self._samples, self._checked_loss, Alone())
                self._done.put(Tested(epoch, loss, accuracy))
            except _ClosingError:
                return
            except BaseException as error:  # told to the training, which raises it
                self._done.put(Tested(epoch, float("nan"), float("nan"), error))

    def _checked_loss(self, output: Tensor, labels: Tensor) -> Tensor:
        if self._closing.is_set():
            raise _ClosingError
        return self._loss(output, labels)


class _ClosingError(Exception):
    """Nobody waits for the test any more."""
