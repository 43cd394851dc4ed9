"""When training ends before its last epoch: a target is reached, or it gets no better.

Both are written as three words with commas: a metric, how to compare, a number.

- ``"val_acc,>,0.97"``: the target is reached when the test accuracy is above 0.97;
- ``"val_loss,~<,4"``: no better means that the test loss has not become smaller for 4 epochs; ``~>``: larger.

The syntax is that of MPI Learn. Decided after each epoch, on the results that are known by then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .history import EpochRow

__all__ = ["METRICS", "EarlyStopping", "Stopping", "Target"]

METRICS: dict[str, Callable[[EpochRow], float]] = {
    "val_loss": lambda row: row.test_loss,
    "val_acc": lambda row: row.test_accuracy,
    "loss": lambda row: row.loss,
    "acc": lambda row: row.accuracy,
}
"""Of an epoch: loss and accuracy (0…1) of the test set, and of the training samples as they were seen."""


@dataclass(frozen=True)
class Target:
    """Reached when `metric` is above (``">"``) or below (``"<"``) `value`."""

    metric: str
    sign: str
    value: float

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read ``"val_acc,>,0.97"``.

        Raises
        ------
        ValueError
            If it is written in another way.
        """
        metric, sign, number = _words("target", text, (">", "<"), "val_acc,>,0.97")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ValueError(f'target={text!r}: {number!r} is no number; an example is "val_acc,>,0.97"')
        return cls(metric, sign, value)

    def reason(self, rows: Sequence[EpochRow]) -> str | None:
        """Return in words that the newest known value reaches it, or None."""
        known = _known(self.metric, rows)
        if not known:
            return None
        epoch, value = known[-1]
        if not (value > self.value if self.sign == ">" else value < self.value):
            return None
        return f"target reached by epoch {epoch}: {self.metric} {value:.6g} {self.sign} {self.value:g}"


@dataclass(frozen=True)
class EarlyStopping:
    """Stops when `metric` has not become smaller (``"~<"``) or larger (``"~>"``) for `patience` epochs."""

    metric: str
    sign: str
    patience: int

    @classmethod
    def parse(cls, text: str) -> EarlyStopping:
        """Read ``"val_loss,~<,4"``.

        Raises
        ------
        ValueError
            If it is written in another way.
        """
        metric, sign, number = _words("early_stopping", text, ("~<", "~>"), "val_loss,~<,4")
        if not (number.isdecimal() and int(number) >= 1):
            raise ValueError(
                f"early_stopping={text!r}: {number!r} is no number of epochs, which is 1 or more; an example is "
                '"val_loss,~<,4"'
            )
        return cls(metric, sign, int(number))

    def reason(self, rows: Sequence[EpochRow]) -> str | None:
        """Return in words that it is time to stop, or None."""
        known = _known(self.metric, rows)
        if len(known) <= self.patience:
            return None
        up = 1.0 if self.sign == "~<" else -1.0
        # The first of equals. NaN, of a training that has diverged, is worse than anything.
        epoch, best = min(known, key=lambda pair: math.inf if math.isnan(pair[1]) else up * pair[1])
        if sum(later > epoch for later, _ in known) < self.patience:
            return None
        word = "smaller" if self.sign == "~<" else "larger"
        return f"{self.metric} has not become {word} than {best:.6g} (epoch {epoch}) for {self.patience} epochs"


class Stopping:
    """Both reasons to end a run, each of which may be absent.

    Parameters
    ----------
    target, early_stopping
        As described above.
    tested
        Whether the model is tested after its epochs.

    Raises
    ------
    ValueError
        If one is written in another way, or about a test that is not made.
    """

    def __init__(self, target: str | None, early_stopping: str | None, *, tested: bool = True) -> None:
        self._rules: list[Target | EarlyStopping] = []
        if target is not None:
            self._rules.append(Target.parse(target))
        if early_stopping is not None:
            self._rules.append(EarlyStopping.parse(early_stopping))
        for rule in self._rules:
            if rule.metric.startswith("val_") and not tested:
                raise ValueError(
                    f"nobody knows {rule.metric} with validate=False: give validate=True, or use loss, acc"
                )

    def reason(self, rows: Sequence[EpochRow]) -> str | None:
        """Return why to stop after these epochs, or None."""
        return next((reason for rule in self._rules if (reason := rule.reason(rows))), None)


def _words(setting: str, text: str, signs: tuple[str, ...], example: str) -> tuple[str, str, str]:
    """Cut `text` into metric, sign and number."""
    words = [word.strip() for word in text.split(",")] if isinstance(text, str) else []
    if len(words) != 3:
        raise ValueError(f'{setting}={text!r} must have three words with commas between them, such as "{example}"')
    metric, sign, number = words
    if metric not in METRICS:
        raise ValueError(f'{setting}={text!r}: there is no {metric!r}, but {", ".join(METRICS)}; as in "{example}"')
    if sign not in signs:
        raise ValueError(f'{setting}={text!r}: {sign!r} must be {" or ".join(signs)}, as in "{example}"')
    return metric, sign, number


def _known(metric: str, rows: Sequence[EpochRow]) -> list[tuple[int, float]]:
    """Epoch and value, where the value is known; NaN where training has diverged."""
    values = [(row.epoch, METRICS[metric](row), math.isnan(row.loss)) for row in rows]
    return [(epoch, value) for epoch, value, diverged in values if diverged or not math.isnan(value)]
