"""How labkit's own algorithms reach other ranks: on the private communicator, apart from every user's message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import starmap
from typing import Any, TypeAlias

import numpy as np

from labkit.comm.agreement import Call
from labkit.comm.communicator import Communicator
from labkit.comm.mpi import MPI
from labkit.comm.retired import ended
from labkit.comm.waiting import Wait, until

__all__ = ["PrivateLink"]

TAG = 1

_Begin: TypeAlias = Callable[[Any, int, int], MPI.Request]


class PrivateLink:
    """Send and receive within one collective call, by waits that can be interrupted and named.

    Arrays are numpy arrays or bytes-like objects; sizes are known to both sides, since the call was agreed on.
    """

    def __init__(self, group: Communicator, call: Call, timeout: float | None = None) -> None:
        self.rank = group.rank
        self.size = group.size
        self._group = group
        self._call = call
        self._timeout = timeout
        self._mpi = group.private
        self._sequence = group.sequence + 1
        """The number that the call will have."""

    def send(self, x: Any, dst: int) -> None:
        """Send all of `x` to rank `dst`."""
        self._complete([(self._mpi.Isend, x, dst)], "sending to", dst)

    def recv(self, x: Any, src: int) -> None:
        """Fill `x` from rank `src`."""
        self._complete([(self._mpi.Irecv, x, src)], "receiving from", src)

    def exchange(self, outgoing: Any, dst: int, incoming: Any, src: int) -> None:
        """Send `outgoing` to `dst` and fill `incoming` from `src` at the same time."""
        self._complete([(self._mpi.Irecv, incoming, src), (self._mpi.Isend, outgoing, dst)], "receiving from", src)

    def recv_unknown(self, src: int) -> bytearray:
        """Receive a message whose length is not known."""
        status = MPI.Status()

        def look() -> bool:
            return bool(self._mpi.Iprobe(src, TAG, status))

        until(look, lambda: self._about("receiving from", src), self._timeout, self._look)
        data = bytearray(status.Get_count(MPI.BYTE))
        self.recv(data, src)
        return data

    def send_all(self, messages: list[tuple[int, Any]]) -> None:
        """Send several messages ``(rank, data)`` at once."""
        sends = [(self._mpi.Isend, data, dst) for dst, data in messages]
        self._complete(sends, "sending to", messages[0][0] if messages else self.rank)

    def _complete(self, transfers: Sequence[tuple[_Begin, Any, int]], doing: str, peer: int) -> None:
        """Begin transfers ``(begin, memory, rank)`` and wait for all of them."""
        about = partial(self._about, doing, peer)
        under_way = _UnderWay(transfers, about)
        self._group.in_flight.add(under_way)  # stays there after an interrupt: MPI may still touch the memory
        requests = under_way.requests
        for begin, memory, rank in transfers:
            # Begun and remembered within one call of a C function.
            requests.extend(starmap(begin, ((_spec(memory), rank, TAG),)))
        for request in requests:
            if not request.Test():
                until(request.Test, about, self._timeout, self._look)
        self._group.in_flight.discard(under_way)

    def _look(self) -> None:
        self._group.ballot.look(self._call, self._sequence)

    def _about(self, doing: str, peer: int) -> Wait:
        group, call = self._group, self._call
        return Wait(
            call.operation,
            group.rank,
            "collective",
            communicator=group.name,
            members=group.members,
            peer=peer,
            peer_in_world=group.members[peer],
            sequence=group.sequence,
            signature=call.text,
            count=call.count,
            dtype=call.dtype,
            text=f"{call.text}, {doing} rank {peer}",
        )


class _UnderWay:
    """Transfers that are under way, with the memory they use. Nobody waits for them once their call was given up."""

    def __init__(self, transfers: Any, about: Callable[[], Wait]) -> None:
        self.requests: list[MPI.Request] = []
        self.about = about
        """What is waited for."""
        self._transfers = transfers

    def sweep(self) -> None:
        """They stay until the communicator is replaced."""

    def ended(self) -> bool:
        """Whether MPI has done with the memory."""
        return all([ended(request) for request in self.requests])

    def give_up(self) -> None:
        """Cancel the receives. A send stays as it is: MPICH ends the process at some that are cancelled."""
        for request, (begin, _, _) in zip(self.requests, self._transfers, strict=False):  # not all may have begun
            if begin.__name__ != "Irecv":
                continue
            try:
                request.Cancel()
                request.Test()
            except MPI.Exception:
                continue  # on a revoked communicator: nothing to cancel


def _spec(x: Any) -> Any:
    return x if isinstance(x, np.ndarray) else [x, MPI.BYTE]
