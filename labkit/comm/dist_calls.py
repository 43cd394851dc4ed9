"""torch.distributed's calls on a labkit communicator: what a process group and a back end of it have in common.

Each collective is labkit's own, so every wait is seen, named and freed as in `labkit.comm`. It is over when it returns,
also with ``async_op=True``: ranks must make their collectives in the same order, which torch asks for anyway, and a
rank that is in one cannot meanwhile help another by a message. Messages are truly asynchronous.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import distributed as dist

from labkit.comm import collectives, reductions
from labkit.comm.communicator import Communicator
from labkit.comm.errors import ArgumentError
from labkit.comm.exchange import all_to_all_uneven, gather_into
from labkit.comm.monitored import monitored_barrier
from labkit.comm.p2p import Request, irecv, isend
from labkit.comm.pieces import in_pieces, pieces
from labkit.comm.sparse import all_reduce_sparse
from labkit.comm.works import Done, Pending, Pieces, Together, seconds

__all__ = ["DistCalls"]

Tensors = list[torch.Tensor]

_OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.BAND: "bitwise_and",
    dist.ReduceOp.BOR: "bitwise_or",
    dist.ReduceOp.BXOR: "bitwise_xor",
    dist.ReduceOp.PREMUL_SUM: "sum",
}
_BOOL_OPS = {"sum": "max"}
"""As in torch's other back ends: true + true is true."""


def _profiled(operation: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let torch's profiler see a call, as ``mpi:all_reduce`` with the shapes of its tensors."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(self: DistCalls, *args: Any, **options: Any) -> Any:
            if not torch._C._autograd._profiler_enabled():
                return method(self, *args, **options)
            name = f"{self.getBackendName()}:{operation}"
            handle = torch._C._autograd._record_function_with_args_enter(name, *_tensors_in(args))
            try:
                return method(self, *args, **options)
            finally:
                torch._C._autograd._record_function_with_args_exit(handle)

        return call

    return decorate


def _tensors_in(args: Any) -> Tensors:
    """The tensors of the last argument that has any, which is the input."""
    for arg in reversed(args):
        if isinstance(arg, torch.Tensor):
            return [arg]
        if isinstance(arg, list) and arg and isinstance(arg[0], torch.Tensor):
            return arg
        if isinstance(arg, list) and arg:
            return _tensors_in(arg)
    return []


class DistCalls:
    """The calls. Whoever inherits them says on which communicator.

    Attributes
    ----------
    default_timeout
        Seconds that a call has if it is told nothing else; None: for ever.
    """

    default_timeout: float | None = None
    _calls = 0
    _coalesced: list[Pending | Pieces] | None = None

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Name of the back end."""
        return "mpi"

    def communicator(self) -> Communicator:
        """Where the calls go."""
        raise TypeError(f"{type(self).__name__} does not say on which communicator its calls go")

    def _begin(self, opts: Any = None) -> tuple[Communicator, float | None]:
        """Communicator and timeout of a collective."""
        self._calls += 1
        given = seconds(getattr(opts, "timeout", None))
        return self.communicator(), self.default_timeout if given is None else given

    # ---- reductions ------------------------------------------------------------------------------------------------

    @_profiled("all_reduce")
    def allreduce(self, tensors: Tensors, opts: Any = None, timeout: Any = None) -> Done:
        """Combine each tensor over the ranks, in place."""
        group, limit = self._begin(opts)
        for x in tensors:
            if x.is_sparse:
                all_reduce_sparse(x, _op_of(opts, x), group, limit)
            else:
                _all_reduce(x, opts, group, limit)
        return Done(tensors)

    allreduce_sparse = allreduce

    @_profiled("all_reduce")
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Done:
        """Combine several tensors at once: those of one dtype travel together."""
        group, limit = self._begin(opts)
        kinds: dict[torch.dtype, Tensors] = {}
        for x in tensors:
            kinds.setdefault(x.dtype, []).append(x.detach())
        for alike in kinds.values():
            flat = torch.cat([x.reshape(-1) for x in alike])
            _all_reduce(flat, opts, group, limit)
            for x, part in zip(alike, flat.split([x.numel() for x in alike]), strict=True):
                x.copy_(part.view_as(x))
        return Done(tensors)

    @_profiled("reduce")
    def reduce(self, tensors: Tensors, opts: Any) -> Done:
        """Combine a tensor over the ranks, at the root."""
        group, limit = self._begin(opts)
        for x in tensors:
            flat = _scaled(_flat(x), opts)
            for piece in pieces(flat):
                reductions.reduce(piece, opts.rootRank, _op_of(opts, x), group=group, timeout=limit)
            if group.rank == opts.rootRank:
                _put_back(flat, x)
        return Done(tensors)

    @_profiled("reduce_scatter")
    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Done:
        """Combine lists of tensors, and give rank r the r-th result."""
        wholes = [torch.cat([part.detach().reshape(-1) for part in parts]) for parts in inputs]
        return self._reduce_scatters(outputs, wholes, opts)

    @_profiled("reduce_scatter")
    def reduce_scatter_single(self, out: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Done:
        """Combine tensors, and give rank r the r-th part."""
        return self._reduce_scatters([out], [x], opts)

    @_profiled("reduce_scatter")
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Done:
        """Several of them."""
        return self._reduce_scatters(outputs, inputs, opts)

    def _reduce_scatters(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Done:
        group, limit = self._begin(opts)
        for out, x in zip(outputs, inputs, strict=True):
            flat = _flat(out)
            whole = _scaled(_flat(x).clone() if _is_premul(opts) else _flat(x), opts)
            reductions.reduce_scatter(flat, whole, _op_of(opts, x), group=group, timeout=limit)
            _put_back(flat, out)
        return Done(outputs)

    # ---- moving ----------------------------------------------------------------------------------------------------

    @_profiled("broadcast")
    def broadcast(self, tensors: Tensors, opts: Any) -> Done:
        """Copy the root's tensors to all ranks."""
        group, limit = self._begin(opts)
        for x in tensors:
            flat = _flat(x)
            for piece in pieces(flat):
                collectives.broadcast(piece, opts.rootRank, group=group, timeout=limit)
            _put_back(flat, x)
        return Done(tensors)

    @_profiled("all_gather")
    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Done:
        """Collect every rank's tensor on every rank."""
        group, limit = self._begin(opts)
        for out, x in zip(outputs, inputs, strict=True):
            _all_gather(out, x, group, limit)
        return Done(outputs)

    @_profiled("all_gather")
    def all_gather_single(self, out: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Done:
        """Collect every rank's tensor in one."""
        return self._all_gather_singles([out], [x], opts)

    @_profiled("all_gather")
    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Done:
        """Collect several tensors: ``outputs[rank][number]``."""
        group, limit = self._begin(opts)
        for number, x in enumerate(inputs):
            _all_gather([row[number] for row in outputs], x, group, limit)
        return Done(outputs)

    @_profiled("all_gather")
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Done:
        """Several of them."""
        return self._all_gather_singles(outputs, inputs, opts)

    def _all_gather_singles(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Done:
        group, limit = self._begin(opts)
        for out, x in zip(outputs, inputs, strict=True):
            flat = _flat(out)
            gather_into(flat, _flat(x), group, limit)
            _put_back(flat, out)
        return Done(outputs)

    @_profiled("gather")
    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Done:
        """Collect every rank's tensor at the root."""
        group, limit = self._begin(opts)
        root = opts.rootRank
        if group.rank == root:
            _same_sizes(outputs[0], inputs[0], group, "gather")
        parts = collectives.gather(_flat(inputs[0]), root, group=group, timeout=limit)
        for target, part in zip(outputs[0] if parts else [], parts or [], strict=True):
            target.detach().copy_(part.view_as(target))  # type: ignore[union-attr]
        return Done(outputs)

    @_profiled("scatter")
    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Done:
        """Give each rank its part of the root's list."""
        group, limit = self._begin(opts)
        root = opts.rootRank
        parts = None
        if group.rank == root:
            _same_sizes(inputs[0], outputs[0], group, "scatter")
            parts = [_flat(part) for part in inputs[0]]
        flat = _flat(outputs[0])
        collectives.scatter(flat, parts, root, group=group, timeout=limit)
        _put_back(flat, outputs[0])
        return Done(outputs)

    @_profiled("all_to_all")
    def all_to_all_single(
        self, out: torch.Tensor, x: torch.Tensor, out_sizes: Sequence[int], sizes: Sequence[int], opts: Any = None
    ) -> Done:
        """Rank r's s-th part goes to rank s; parts are rows, equal ones where no sizes are given."""
        group, limit = self._begin(opts)
        flat, source = _flat(out), _flat(x)
        if not out_sizes and not sizes:
            collectives.all_to_all(flat, source, group=group, timeout=limit)
        else:
            rows_out, rows = _rows(out, out_sizes, group.size), _rows(x, sizes, group.size)
            all_to_all_uneven(flat, rows_out, source, rows, group, limit)
        _put_back(flat, out)
        return Done([out])

    @_profiled("all_to_all")
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Done:
        """Rank r's s-th tensor becomes rank s's r-th."""
        group, limit = self._begin(opts)
        counts, into = [x.numel() for x in inputs], [out.numel() for out in outputs]
        whole = torch.cat([x.detach().reshape(-1) for x in inputs])
        flat = torch.empty(sum(into), dtype=whole.dtype, device=whole.device)
        all_to_all_uneven(flat, into, whole, counts, group, limit)
        for out, part in zip(outputs, flat.split(into), strict=True):
            out.detach().copy_(part.view_as(out))
        return Done(outputs)

    # ---- messages --------------------------------------------------------------------------------------------------

    @_profiled("send")
    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Pending | Pieces:
        """Begin to send."""
        group = self.communicator()
        return self._pending([isend(piece, dst, tag, group=group) for piece in pieces(_flat(tensors[0]))], tensors)

    @_profiled("recv")
    def recv(self, tensors: Tensors, src: int | None, tag: int = 0) -> Pending | Pieces:
        """Begin to receive."""
        return self._receive(tensors, src, tag)

    @_profiled("recvAnySource")
    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Pending | Pieces:
        """Begin to receive from whoever sends."""
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Tensors, src: int | None, tag: int) -> Pending | Pieces:
        group, x = self.communicator(), tensors[0].detach()
        if not in_pieces(x):
            return self._pending([irecv(x, src, tag, group=group)], tensors)
        if src is None:
            raise ArgumentError(
                f"{group.who('recv')}: {x.numel()} elements come in several messages, which must be of one rank: say "
                "which, dist.recv(x, src=…)."
            )
        flat = _flat(x)
        requests = [irecv(piece, src, tag, group=group) for piece in pieces(flat)]
        return self._pending(requests, tensors, partial(_put_back, flat, x))

    def _pending(
        self, requests: Sequence[Request], tensors: Tensors, finish: Callable[[], None] | None = None
    ) -> Pending | Pieces:
        works = [Pending(request, tensors, self.default_timeout) for request in requests]
        work = works[0] if len(works) == 1 else Pieces(works, tensors, finish)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def start_coalescing(self, *_: Any) -> None:
        """From here on messages are waited for together."""
        self._coalesced = []

    def end_coalescing(self, *_: Any) -> Together:
        """The wait for them."""
        works, self._coalesced = self._coalesced or [], None
        return Together(works)

    # ---- all together ----------------------------------------------------------------------------------------------

    @_profiled("barrier")
    def barrier(self, opts: Any = None, timeout: Any = None) -> Done:
        """Return once every rank is here."""
        group, limit = self._begin(opts)
        collectives.barrier(group=group, timeout=limit)
        return Done([])

    def monitored_barrier(self, opts: Any = None, wait_all_ranks: bool = False, **_: Any) -> None:
        """Return once every rank is here, or let rank 0 name those that do not come in time."""
        group, limit = self._begin(opts)
        given = seconds(opts)
        monitored_barrier(group, limit if given is None else given, wait_all_ranks, self._calls)


def _op_of(opts: Any, x: torch.Tensor) -> str:
    op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
    name = _OPS[getattr(op, "op", op)]
    return _BOOL_OPS.get(name, name) if x.dtype is torch.bool else name


def _is_premul(opts: Any) -> bool:
    op = getattr(opts, "reduceOp", None)
    return op is not None and getattr(op, "op", op) == dist.ReduceOp.PREMUL_SUM


def _scaled(x: torch.Tensor, opts: Any) -> torch.Tensor:
    """`x` times the factor of ``PREMUL_SUM``, in place; `x` for other operations."""
    return x.mul_(opts.reduceOp.__getstate__()[1]) if _is_premul(opts) else x


def _all_reduce(x: torch.Tensor, opts: Any, group: Communicator, timeout: float | None) -> None:
    flat = _scaled(_flat(x), opts)
    for piece in pieces(flat):
        reductions.all_reduce(piece, _op_of(opts, x), group=group, timeout=timeout)
    _put_back(flat, x)


def _all_gather(out: Tensors, x: torch.Tensor, group: Communicator, timeout: float | None) -> None:
    _same_sizes(out, x, group, "all_gather")
    for target, part in zip(out, collectives.all_gather(_flat(x), group=group, timeout=timeout), strict=True):
        target.detach().copy_(part.view_as(target))  # type: ignore[union-attr]


def _flat(x: torch.Tensor) -> torch.Tensor:
    """`x` as a vector: a view of its memory where that is contiguous, or a copy."""
    data = x.detach()
    return data.view(-1) if data.is_contiguous() else data.reshape(-1)


def _put_back(flat: torch.Tensor, x: torch.Tensor) -> None:
    """Copy the result into `x` where `_flat` had to make a copy."""
    if flat.data_ptr() != x.data_ptr():
        x.detach().copy_(flat.view(x.shape))


def _rows(x: torch.Tensor, sizes: Sequence[int], ranks: int) -> list[int]:
    """How many elements each rank's part of `x` has, by its rows (equally many where none are given)."""
    length = x.shape[0] if x.dim() else 0
    row = x.numel() // length if length else 0
    return [size * row for size in (sizes or [length // ranks] * ranks)]


def _same_sizes(many: Tensors, one: torch.Tensor, group: Communicator, operation: str) -> None:
    wrong = [number for number, x in enumerate(many) if x.numel() != one.numel() or x.dtype != one.dtype]
    if wrong or len(many) != group.size:
        raise ArgumentError(
            f"{group.who(operation)}: the list must hold {group.size} tensors of {one.numel()} × {one.dtype}, "
            f"it holds {[(x.numel(), str(x.dtype)) for x in many]}."
        )
