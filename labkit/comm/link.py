"""How labkit's own algorithms reach other ranks: on the private communicator, apart from every user's message."""

from __future__ import annotations

from typing import Any

import numpy as np

from labkit.comm.agreement import Call
from labkit.comm.communicator import Communicator
from labkit.comm.mpi import MPI
from labkit.comm.waiting import Wait, until

__all__ = ["PrivateLink"]

TAG = 1


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

    def send(self, x: Any, dst: int) -> None:
        """Send all of `x` to rank `dst`."""
        self._complete([self._mpi.Isend(_spec(x), dst, TAG)], x, "sending to", dst)

    def recv(self, x: Any, src: int) -> None:
        """Fill `x` from rank `src`."""
        self._complete([self._mpi.Irecv(_spec(x), src, TAG)], x, "receiving from", src)

    def exchange(self, outgoing: Any, dst: int, incoming: Any, src: int) -> None:
        """Send `outgoing` to `dst` and fill `incoming` from `src` at the same time."""
        requests = [self._mpi.Irecv(_spec(incoming), src, TAG), self._mpi.Isend(_spec(outgoing), dst, TAG)]
        self._complete(requests, (outgoing, incoming), "receiving from", src)

    def recv_unknown(self, src: int) -> bytearray:
        """Receive a message whose length is not known."""
        found: list[Any] = []
        status = MPI.Status()

        def look() -> bool:
            message = self._mpi.Improbe(src, TAG, status)
            if message is not None:
                found.append(message)
            return message is not None

        until(look, lambda: self._about("receiving from", src), self._timeout)
        data = bytearray(status.Get_count(MPI.BYTE))
        self._complete([found[0].Irecv([data, MPI.BYTE])], data, "receiving from", src)
        return data

    def send_all(self, messages: list[tuple[int, Any]]) -> None:
        """Send several messages ``(rank, data)`` at once."""
        requests = [self._mpi.Isend(_spec(data), dst, TAG) for dst, data in messages]
        self._complete(requests, messages, "sending to", messages[0][0] if messages else self.rank)

    def _complete(self, requests: list[Any], memory: Any, doing: str, peer: int) -> None:
        try:
            for request in requests:
                if not request.Test():
                    until(request.Test, lambda: self._about(doing, peer), self._timeout)
        except BaseException:
            # MPI may still touch the memory; the communicator is given up with it.
            self._group.in_flight.add(_Abandoned(requests, memory))
            raise

    def _about(self, doing: str, peer: int) -> Wait:
        group, call = self._group, self._call
        return Wait(
            call.operation,
            group.rank,
            "collective",
            communicator=group.name,
            members=group.members,
            sequence=group.sequence,
            signature=call.text,
            peer=peer,
            peer_in_world=group.members[peer],
            count=call.count,
            dtype=call.dtype,
            text=f"{call.text}, {doing} rank {peer}",
        )


class _Abandoned:
    """Requests nobody waits for any more, with the memory they may still use."""

    _receives = True

    def __init__(self, requests: list[Any], memory: Any) -> None:
        self._requests = requests
        self._memory = memory

    def give_up(self) -> None:
        """Cancel what can be cancelled; the rest stays as it is."""
        for request in self._requests:
            try:
                request.Cancel()
                request.Test()
            except MPI.Exception:
                continue  # a send, or one on a revoked communicator: nothing to cancel


def _spec(x: Any) -> Any:
    return x if isinstance(x, np.ndarray) else [x, MPI.BYTE]
