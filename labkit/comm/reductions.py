"""Collectives that combine data: reduce, all_reduce, reduce_scatter, scan.

`op` is ``"sum"``, ``"mean"``, ``"min"``, ``"max"``, ``"product"``, ``"bitwise_and"``, ``"bitwise_or"``,
``"bitwise_xor"`` or a function ``f(a, b)`` of two tensors. A function must be associative; it is applied in rank
order, ``f(f(x₀, x₁), x₂) …``, on tensors of the whole shape.

float16 and bfloat16 are reduced in float32 and rounded once at the end. bool takes min (all), max (any) and product.
What has no meaning is refused: the mean of integers, the minimum of complex numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np

from labkit.comm import hosts, shared, sharing, windows
from labkit.comm.agreement import Call, collective
from labkit.comm.algorithms import ALGORITHMS, Combine
from labkit.comm.board import SLOT_BYTES
from labkit.comm.buffers import Array, Buffer, Kind, empty_like, reading, reducing, writing
from labkit.comm.collectives import all_gather, gather
from labkit.comm.communicator import Communicator, current
from labkit.comm.errors import ArgumentError
from labkit.comm.link import PrivateLink
from labkit.comm.mpi import MPI

if TYPE_CHECKING:
    import torch

__all__ = ["Op", "all_reduce", "reduce", "reduce_scatter", "scan"]

Op: TypeAlias = str | Callable[[Any, Any], Any]


class _Operator(NamedTuple):
    mpi: MPI.Op
    combine: Combine


class _Plan(NamedTuple):
    mpi: MPI.Op
    combine: Combine
    algorithm: str | None
    """None: the library's."""
    shared: bool
    """Whether it is combined in shared memory."""


_OPERATORS = {
    "sum": _Operator(MPI.SUM, np.add),
    "mean": _Operator(MPI.SUM, np.add),
    "min": _Operator(MPI.MIN, np.minimum),
    "max": _Operator(MPI.MAX, np.maximum),
    "product": _Operator(MPI.PROD, np.multiply),
    "bitwise_and": _Operator(MPI.BAND, np.bitwise_and),
    "bitwise_or": _Operator(MPI.BOR, np.bitwise_or),
    "bitwise_xor": _Operator(MPI.BXOR, np.bitwise_xor),
}
RING_FROM_BYTES = 32 << 20
"""From here the ring beat Open MPI 5.0's own all-reduce on one host: 5.9 against 10.2 ms at 32 MiB on 2 ranks, 26
against 51 ms on 3, 20 against 34 ms on 4 (2 cores). Up to 16 MiB both were alike."""
_KEEPS_ORDER = ("to_root", "tree", "recursive_doubling")


def all_reduce(
    x: Array,
    op: Op = "sum",
    algorithm: str | None = None,
    *,
    group: Communicator | None = None,
    timeout: float | None = None,
) -> Array:
    """Combine every rank's `x` and put the result into every rank's `x`; return it.

    Parameters
    ----------
    x
        Tensor or array, of the same dtype and shape on all ranks.
    op
        See the module's text.
    algorithm
        None: the fastest: `labkit.comm.shared` for small tensors on one host, `labkit.comm.sharing` for large ones from
        `shared_zeros`, the ring for sums and means of 32 MiB and more that lie elsewhere, MPI's own for the others.
        ``"library"``: always MPI's own. Otherwise a name of `labkit.comm.ALGORITHMS`: written with send and receive,
        to be read and measured. Functions as `op` go with ``"to_root"``, ``"tree"`` and ``"recursive_doubling"``, which
        keep the order of ranks and do not cut the tensor.
    group, timeout
        See `labkit.comm`.

    Raises
    ------
    MismatchError
        On every rank, when the ranks' calls, ops, dtypes or shapes differ.
    ArgumentError
        When `op` has no meaning for the dtype.
    """
    communicator = current(group)
    if not isinstance(op, str):
        return _all_reduce_by_function(x, op, algorithm, communicator, timeout)
    if not communicator.arranged and x.nbytes > SLOT_BYTES:
        hosts.arrange(communicator)
    place = windows.find(communicator, x) if communicator.windows and algorithm is None else None
    buffer = reducing(x, "all_reduce") if place is None else place.buffer
    key = ("all_reduce", op, algorithm, x.dtype, buffer.shape)
    call = communicator.calls.get(key)
    if call is None:
        call = _make_call(communicator, "all_reduce", op, algorithm, buffer, x, key)
    plan: _Plan = call.plan
    if plan.shared:
        shared.all_reduce(communicator, call, buffer, plan.combine, timeout)
    elif place is not None or (algorithm is None and sharing.suits(communicator, buffer)):
        divisor = communicator.size if op == "mean" else 1
        sharing.Reduction(communicator, call, buffer, place, plan.combine, plan.mpi, divisor, timeout).start()
        return x
    elif plan.algorithm is None:
        in_place = (MPI.IN_PLACE, buffer.spec, plan.mpi)
        collective(communicator, call, timeout, communicator.mpi.Allreduce, in_place)
    else:
        link = PrivateLink(communicator, call, timeout)
        args = (buffer.array(), plan.combine, link)
        collective(communicator, call, timeout, ALGORITHMS[plan.algorithm], args, atomic=False)
    _finish(buffer, op, communicator)
    return x


def reduce(
    x: Array, dst: int = 0, op: Op = "sum", *, group: Communicator | None = None, timeout: float | None = None
) -> Array:
    """Combine every rank's `x` and put the result into `x` of rank `dst`; the others keep theirs. Return `x`.

    `op` as in `all_reduce`.
    """
    communicator = current(group)
    communicator.check_rank(dst, "reduce", "dst")
    if not isinstance(op, str):
        if communicator.rank == dst:
            writing(x, communicator.who("reduce"))  # refuse what cannot take the result, before anybody waits
        everyone = gather(x, dst, group=communicator, timeout=timeout)
        if everyone is not None:
            _store(x, _fold(op, everyone, communicator, "reduce"))
        return x
    at_destination = communicator.rank == dst
    buffer = reducing(x, communicator.who("reduce")) if at_destination else _readable(x, communicator.who("reduce"))
    call = _call(communicator, "reduce", op, f"dst={dst}", buffer, x)
    args = (MPI.IN_PLACE, buffer.spec) if at_destination else (buffer.spec, None)
    collective(communicator, call, timeout, communicator.mpi.Reduce, (*args, call.plan.mpi, dst))
    if at_destination:
        _finish(buffer, op, communicator)
    return x


def reduce_scatter(
    out: Array, x: Array, op: Op = "sum", *, group: Communicator | None = None, timeout: float | None = None
) -> Array:
    """Combine every rank's `x` and give rank r the r-th part of the result, in `out`.

    Parameters
    ----------
    out
        Same shape on all ranks.
    x
        Of shape ``(size, *out.shape)``, or with `size` times `out`'s first dimension; same dtype as `out`.
    op
        As in `all_reduce`.
    group, timeout
        See `labkit.comm`.
    """
    communicator = current(group)
    who = communicator.who("reduce_scatter")
    into, size = writing(out, who), communicator.size
    if x is out:
        raise ArgumentError(f"{who}: out and x are the same tensor.")
    source = _readable(x, who)
    shape, inner = tuple(source.shape), tuple(into.shape)
    if shape != (size, *inner) and not (inner and shape == (size * inner[0], *inner[1:])):
        raise ArgumentError(
            f"{who}: x has shape {shape}, but {size} parts shaped like out, {inner}, need {(size, *inner)}."
        )
    if x.dtype != out.dtype:
        raise ArgumentError(f"{who}: x is {x.dtype}, out is {out.dtype}: use one dtype.")
    if not isinstance(op, str):
        everyone = [part.reshape((size, *inner)) for part in all_gather(x, group=communicator, timeout=timeout)]
        mine = [part[communicator.rank] for part in everyone]
        _store(out, _fold(op, mine, communicator, "reduce_scatter"))
        return out
    call = _call(communicator, "reduce_scatter", op, "", source, x)
    target = reducing(out, who)  # like the source: float32 where out is of half width
    source.spec[1] = target.count
    args = (source.spec, target.spec, call.plan.mpi)
    collective(communicator, call, timeout, communicator.mpi.Reduce_scatter_block, args)
    _finish(target, op, communicator)
    return out


def scan(x: Array, op: Op = "sum", *, group: Communicator | None = None, timeout: float | None = None) -> Array:
    """Combine the `x` of ranks 0 to r and put the result into rank r's `x` (an inclusive prefix); return it.

    With ``op="mean"`` rank r has the mean over its r + 1 ranks.
    """
    communicator = current(group)
    who = communicator.who("scan")
    if not isinstance(op, str):
        writing(x, who)
        everyone = all_gather(x, group=communicator, timeout=timeout)
        _store(x, _fold(op, everyone[: communicator.rank + 1], communicator, "scan"))
        return x
    buffer = reducing(x, who)
    call = _call(communicator, "scan", op, "", buffer, x)
    collective(communicator, call, timeout, communicator.mpi.Scan, (MPI.IN_PLACE, buffer.spec, call.plan.mpi))
    _finish(buffer, op, communicator, communicator.rank + 1)
    return x


def _finish(buffer: Buffer, op: str, communicator: Communicator, ranks: int | None = None) -> None:
    """Divide where the mean was asked for, before the one rounding to half width, and copy back."""
    if op == "mean":
        ranks = ranks or communicator.size
        if isinstance(buffer.holder, np.ndarray):
            np.divide(buffer.holder, ranks, out=buffer.holder)
        else:
            holder = buffer.holder
            (holder.detach() if holder.requires_grad else holder).div_(ranks)
    if buffer.holder is not buffer.x:
        buffer.restore()


def _readable(x: Array, who: str) -> Buffer:
    """`x` to be reduced but not written to: widened where `reducing` would, read-only arrays allowed."""
    buffer = reading(x, who)
    if buffer.kind.family != "half":
        return buffer
    wide = x.astype(np.float32) if isinstance(x, np.ndarray) else x.detach().float()
    return reading(wide, who)


def _call(communicator: Communicator, operation: str, op: str, detail: str, buffer: Buffer, x: Array) -> Call:
    key = (operation, op, detail, x.dtype, buffer.shape)
    call = communicator.calls.get(key)
    return call or _make_call(communicator, operation, op, None, buffer, x, key, detail)


def _make_call(
    communicator: Communicator,
    operation: str,
    op: str,
    algorithm: str | None,
    buffer: Buffer,
    x: Array,
    key: Any,
    detail: str = "",
) -> Call:
    """Check op, algorithm and dtype the first time they come together."""
    who = communicator.who(operation)
    operator = _operator(op, buffer.kind, who)
    if algorithm not in (None, "library", *ALGORITHMS):
        known = ", ".join(("library", *ALGORITHMS))
        raise ArgumentError(f"{who}: algorithm={algorithm!r} is unknown. Known: {known}.")
    name = str(x.dtype).removeprefix("torch.")
    asked = algorithm
    # Of float16 and bfloat16 as they are combined: in a window they lie as they are.
    nbytes = buffer.count * (4 if buffer.kind.family == "half" else buffer.kind.itemsize)
    large = operation == "all_reduce" and op in ("sum", "mean") and nbytes >= RING_FROM_BYTES
    if algorithm is None and large and communicator.size > 1 and not sharing.suits(communicator, buffer):
        algorithm = "ring"
    in_shared = operation == "all_reduce" and algorithm is None and shared.suits(communicator, buffer)
    plan = _Plan(*operator, None if algorithm == "library" else algorithm, in_shared)
    shown = plan.algorithm or asked  # "library" is not the default: that may be combined in shared memory
    details = [op, f"algorithm={shown}" if shown else "", detail]
    text = ", ".join(part for part in [*details, name, f"shape {tuple(buffer.shape)}"] if part)
    return communicator.remember(key, Call(communicator, operation, text, count=buffer.count, dtype=name, plan=plan))


def _operator(op: str, kind: Kind, who: str) -> _Operator:
    if op not in _OPERATORS:
        raise ArgumentError(f"{who}: op={op!r} is unknown. Known: {', '.join(_OPERATORS)}, or a function f(a, b).")
    family = kind.family
    if family == "opaque":
        raise ArgumentError(f"{who}: {kind} can be moved but not reduced: convert with x.to(torch.float32).")
    if family == "bool" and op in ("sum", "mean"):
        raise ArgumentError(
            f"{who}: the {op} of bool is ambiguous. Use op='max' (any), op='min' (all), "
            "or count with x.to(torch.int64)."
        )
    if family not in ("bool", "integer") and op.startswith("bitwise"):
        raise ArgumentError(f"{who}: op={op!r} is for integers and bool, not for {kind}.")
    if family == "integer" and op == "mean":
        raise ArgumentError(f"{who}: the mean of {kind} is no integer: use x.float(), or op='sum' and divide.")
    if family == "complex" and op in ("min", "max"):
        raise ArgumentError(f"{who}: complex numbers have no order, so no {op}: reduce x.abs() or x.real.")
    return _OPERATORS[op]


def _all_reduce_by_function(
    x: Array, function: Any, algorithm: str | None, communicator: Communicator, timeout: float | None
) -> Array:
    """`f(a, b)` as op. By default every rank gathers all parts and folds them alike, so all raise if `f` does."""
    who = communicator.who("all_reduce")
    if not callable(function):
        raise ArgumentError(f"{who}: op={function!r} is neither a name nor a function f(a, b).")
    buffer = writing(x, who)
    if algorithm is None or algorithm == "library":
        everyone = all_gather(x, group=communicator, timeout=timeout)
        _store(x, _fold(function, everyone, communicator, "all_reduce"))
        return x
    if algorithm not in _KEEPS_ORDER:
        raise ArgumentError(
            f"{who}: algorithm={algorithm!r} cuts the tensor, or combines out of rank order: for a function use one "
            f"of {', '.join(_KEEPS_ORDER)}."
        )
    buffer = _copied(x, who)

    def combine(lower: Any, higher: Any, out: Any) -> None:
        a, b = _like(x, lower), _like(x, higher)
        result = _fold(function, [a, b], communicator, "all_reduce")
        _store(_like(x, out), result)

    name = getattr(function, "__qualname__", type(function).__name__)
    kind = buffer.kind.name
    call = Call(
        communicator,
        "all_reduce",
        f"{name}, algorithm={algorithm}, {kind}, shape {tuple(buffer.shape)}",
        count=buffer.count,
        dtype=kind,
    )
    link = PrivateLink(communicator, call, timeout)
    args = (buffer.array(), combine, link)
    collective(communicator, call, timeout, ALGORITHMS[algorithm], args, atomic=False)
    buffer.restore()
    return x


def _copied(x: Array, who: str) -> Buffer:
    """A contiguous copy of `x` to work on, whatever its dtype."""
    copy = empty_like(x, tuple(x.shape))
    _store(copy, x)
    return reading(copy, who)._replace(x=x)


def _like(x: Array, flat: np.ndarray[Any, Any]) -> Array:
    """Flat memory as a tensor or array of `x`'s dtype and shape, sharing the memory."""
    if isinstance(x, np.ndarray):
        return flat.view(x.dtype).reshape(x.shape)
    import torch

    return torch.from_numpy(flat).view(x.dtype).reshape(x.shape)


def _fold(function: Any, parts: list[Array], communicator: Communicator, operation: str) -> Array:
    """f(f(x₀, x₁), x₂) … in rank order."""
    result = parts[0]
    for part in parts[1:]:
        result = function(result, part)
        if tuple(getattr(result, "shape", ())) != tuple(part.shape) or not hasattr(result, "dtype"):
            raise ArgumentError(
                f"{communicator.who(operation)}: the function returned "
                f"{type(result).__name__} of shape {tuple(getattr(result, 'shape', ()))}; "
                f"it must return one of shape {tuple(part.shape)}, like its arguments."
            )
    return result


def _store(x: Array, result: Array) -> None:
    if isinstance(x, np.ndarray):
        np.copyto(x, result, casting="same_kind")
    else:
        x.detach().copy_(cast("torch.Tensor", result))
