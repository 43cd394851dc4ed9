"""Collectives into one tensor: all ranks' parts one behind the other, and parts of unequal length."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from labkit.comm.agreement import Call, collective
from labkit.comm.buffers import reading, writing
from labkit.comm.collectives import all_to_all
from labkit.comm.communicator import Communicator
from labkit.comm.errors import ArgumentError, MismatchError

if TYPE_CHECKING:
    import torch

__all__ = ["all_to_all_uneven", "gather_into"]


def gather_into(out: torch.Tensor, x: torch.Tensor, group: Communicator, timeout: float | None) -> None:
    """Collect every rank's vector `x` in the vector `out`, which is as long as all of them together."""
    who = group.who("all_gather")
    part, whole = reading(x, who), writing(out, who)
    if whole.count != part.count * group.size or whole.kind is not part.kind:
        raise ArgumentError(
            f"{who}: {group.size} parts of {part.count} × {part.kind} do not fit {whole.count} × {whole.kind}."
        )
    call = _call(group, "all_gather", f"{part.kind.name}, {part.count} elements", part.count)
    whole.spec[1] = part.count
    collective(group, call, timeout, group.mpi.Allgather, (part.spec, whole.spec))
    whole.restore()


def all_to_all_uneven(
    out: torch.Tensor,
    counts_out: Sequence[int],
    x: torch.Tensor,
    counts: Sequence[int],
    group: Communicator,
    timeout: float | None,
) -> None:
    """Send rank r ``counts[r]`` elements of the vector `x`, and fill `out` with ``counts_out[r]`` of each rank r.

    Raises
    ------
    MismatchError
        On every rank that expects another length than it is to get. No data has moved there or anywhere.
    """
    who = group.who("all_to_all")
    source, into = reading(x, who), writing(out, who)
    for given, vector in ((counts, source), (counts_out, into)):
        if len(given) != group.size or sum(given) != vector.count:
            raise ArgumentError(f"{who}: parts of {list(given)} elements do not make up {vector.count} elements.")
    coming = np.empty(group.size, np.int64)
    all_to_all(coming, np.asarray(counts, np.int64), group=group, timeout=timeout)
    wrong = [rank for rank in range(group.size) if coming[rank] != counts_out[rank]]
    call = _call(group, "all_to_all", f"{source.kind.name}, unequal parts", None)
    fits = _call(group, "all_to_all", f"rank {group.rank} expects other lengths", None) if wrong else call
    try:
        collective(
            group,
            fits,
            timeout,
            group.mpi.Alltoallv,
            (
                [source.spec[0], (list(counts), _starts(counts)), source.kind.mpi],
                [into.spec[0], (list(counts_out), _starts(counts_out)), into.kind.mpi],
            ),
        )
    except MismatchError as error:
        if not wrong:
            raise
        sides = ", ".join(f"{coming[rank]} from rank {rank}, not {counts_out[rank]}" for rank in wrong)
        raise MismatchError(f"{who}: elements on the way to this rank: {sides}. {error}") from None
    into.restore()


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts)][:-1]


def _call(group: Communicator, operation: str, details: str, count: int | None) -> Call:
    key = (operation, details)
    return group.calls.get(key) or group.remember(key, Call(group, operation, details, count=count))
