"""torch.distributed's calls on a labkit communicator: what a process group and a back end of it have in common.

Each collective is labkit's own, so every wait is seen, named and freed as in `labkit.comm`. It is over when it returns,
also with ``async_op=True``: ranks must make their collectives in the same order, which torch asks for anyway, and a
rank that is in one cannot meanwhile help another by a message. Messages are truly asynchronous.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from labkit.comm import collectives, reductions
from labkit.comm.communicator import Communicator
from labkit.comm.errors import ArgumentError
from labkit.comm.exchange import all_to_all_uneven, gather_into
from labkit.comm.monitored import monitored_barrier
from labkit.comm.p2p import Request, irecv, isend
from labkit.comm.pieces import in_pieces, pieces
from labkit.comm.profiled import profiled
from labkit.comm.sparse import all_reduce_sparse
from labkit.comm.torch_arguments import factor, flat_of, operation, put_back, rows, same_sizes, scaled
from labkit.comm.works import Done, Pending, Pieces, Together, seconds

__all__ = ["DistCalls"]

Tensors = list[torch.Tensor]


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

    @profiled("all_reduce")
    def allreduce(self, tensors: Tensors, opts: Any = None, timeout: Any = None) -> Done:
        """Combine each tensor over the ranks, in place."""
        group, limit = self._begin(opts)
        for x in tensors:
            if x.is_sparse:
                all_reduce_sparse(x, operation(opts, x.dtype), group, limit)
            else:
                _all_reduce(x, opts, group, limit)
        return Done(tensors)

    allreduce_sparse = allreduce

    @profiled("all_reduce")
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

    @profiled("reduce")
    def reduce(self, tensors: Tensors, opts: Any) -> Done:
        """Combine a tensor over the ranks, at the root."""
        group, limit = self._begin(opts)
        for x in tensors:
            flat, op = flat_of(x), operation(opts, x.dtype)
            if op == "premul_sum":
                flat, op = scaled(flat, x, opts), "sum"
            for piece in pieces(flat):
                reductions.reduce(piece, opts.rootRank, op, group=group, timeout=limit)
            if group.rank == opts.rootRank:
                put_back(flat, x)
        return Done(tensors)

    @profiled("reduce_scatter")
    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Done:
        """Combine lists of tensors, and give rank r the r-th result."""
        wholes = [torch.cat([part.detach().reshape(-1) for part in parts]) for parts in inputs]
        return self._reduce_scatters(outputs, wholes, opts)

    @profiled("reduce_scatter")
    def reduce_scatter_single(self, out: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Done:
        """Combine tensors, and give rank r the r-th part."""
        return self._reduce_scatters([out], [x], opts)

    @profiled("reduce_scatter")
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Done:
        """Several of them."""
        return self._reduce_scatters(outputs, inputs, opts)

    def _reduce_scatters(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Done:
        group, limit = self._begin(opts)
        for out, x in zip(outputs, inputs, strict=True):
            flat, whole, op = flat_of(out), flat_of(x), operation(opts, x.dtype)
            if op == "premul_sum":
                whole, op = scaled(whole, x, opts), "sum"
            reductions.reduce_scatter(flat, whole, op, group=group, timeout=limit)
            put_back(flat, out)
        return Done(outputs)

    # ---- moving ----------------------------------------------------------------------------------------------------

    @profiled("broadcast")
    def broadcast(self, tensors: Tensors, opts: Any) -> Done:
        """Copy the root's tensors to all ranks."""
        group, limit = self._begin(opts)
        for x in tensors:
            flat = flat_of(x)
            for piece in pieces(flat):
                collectives.broadcast(piece, opts.rootRank, group=group, timeout=limit)
            put_back(flat, x)
        return Done(tensors)

    @profiled("all_gather")
    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Done:
        """Collect every rank's tensor on every rank."""
        group, limit = self._begin(opts)
        for out, x in zip(outputs, inputs, strict=True):
            _all_gather(out, x, group, limit)
        return Done(outputs)

    @profiled("all_gather")
    def all_gather_single(self, out: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Done:
        """Collect every rank's tensor in one."""
        return self._all_gather_singles([out], [x], opts)

    @profiled("all_gather")
    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Done:
        """Collect several tensors: ``outputs[rank][number]``."""
        group, limit = self._begin(opts)
        for number, x in enumerate(inputs):
            _all_gather([row[number] for row in outputs], x, group, limit)
        return Done(outputs)

    @profiled("all_gather")
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Done:
        """Several of them."""
        return self._all_gather_singles(outputs, inputs, opts)

    def _all_gather_singles(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Done:
        group, limit = self._begin(opts)
        for out, x in zip(outputs, inputs, strict=True):
            flat = flat_of(out)
            gather_into(flat, flat_of(x), group, limit)
            put_back(flat, out)
        return Done(outputs)

    @profiled("gather")
    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Done:
        """Collect every rank's tensor at the root."""
        group, limit = self._begin(opts)
        root = opts.rootRank
        if group.rank == root:
            same_sizes(outputs[0], inputs[0], group, "gather")
        parts = collectives.gather(flat_of(inputs[0]), root, group=group, timeout=limit)
        for target, part in zip(outputs[0] if parts else [], parts or [], strict=True):
            target.detach().copy_(part.view_as(target))  # type: ignore[union-attr]
        return Done(outputs)

    @profiled("scatter")
    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Done:
        """Give each rank its part of the root's list."""
        group, limit = self._begin(opts)
        root = opts.rootRank
        parts = None
        if group.rank == root:
            same_sizes(inputs[0], outputs[0], group, "scatter")
            parts = [flat_of(part) for part in inputs[0]]
        flat = flat_of(outputs[0])
        collectives.scatter(flat, parts, root, group=group, timeout=limit)
        put_back(flat, outputs[0])
        return Done(outputs)

    @profiled("all_to_all")
    def all_to_all_single(
        self, out: torch.Tensor, x: torch.Tensor, out_sizes: Sequence[int], sizes: Sequence[int], opts: Any = None
    ) -> Done:
        """Rank r's s-th part goes to rank s; parts are rows, equal ones where no sizes are given."""
        group, limit = self._begin(opts)
        flat, source = flat_of(out), flat_of(x)
        if not out_sizes and not sizes:
            collectives.all_to_all(flat, source, group=group, timeout=limit)
        else:
            rows_out, rows_in = rows(out, out_sizes, group.size), rows(x, sizes, group.size)
            all_to_all_uneven(flat, rows_out, source, rows_in, group, limit)
        put_back(flat, out)
        return Done([out])

    @profiled("all_to_all")
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

    @profiled("send")
    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Pending | Pieces:
        """Begin to send."""
        group = self.communicator()
        return self._pending([isend(piece, dst, tag, group=group) for piece in pieces(flat_of(tensors[0]))], tensors)

    @profiled("recv")
    def recv(self, tensors: Tensors, src: int | None, tag: int = 0) -> Pending | Pieces:
        """Begin to receive."""
        return self._receive(tensors, src, tag)

    @profiled("recvAnySource")
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
        flat = flat_of(x)
        requests = [irecv(piece, src, tag, group=group) for piece in pieces(flat)]
        return self._pending(requests, tensors, partial(put_back, flat, x))

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

    @profiled("barrier")
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


def _all_reduce(x: torch.Tensor, opts: Any, group: Communicator, timeout: float | None) -> None:
    op = operation(opts, x.dtype)
    if op == "premul_sum":
        x.detach().mul_(factor(opts))
        op = "sum"
    if not in_pieces(x):
        reductions.all_reduce(x, op, group=group, timeout=timeout)
        return
    flat = flat_of(x)
    for piece in pieces(flat):
        reductions.all_reduce(piece, op, group=group, timeout=timeout)
    put_back(flat, x)


def _all_gather(out: Tensors, x: torch.Tensor, group: Communicator, timeout: float | None) -> None:
    same_sizes(out, x, group, "all_gather")
    for target, part in zip(out, collectives.all_gather(flat_of(x), group=group, timeout=timeout), strict=True):
        target.detach().copy_(part.view_as(target))  # type: ignore[union-attr]
