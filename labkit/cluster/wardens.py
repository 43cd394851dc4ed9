"""Asking the ranks while they are busy: each has a thread that answers at a socket file (see `labkit.comm.warden`)."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import zmq

__all__ = ["Wardens", "socket_path"]


def socket_path(folder: Path, pid: int | str) -> Path:
    """Where the rank with this process id listens."""
    return folder / f"rank-{pid}.socket"


class Wardens:
    """Questions to the ranks of one lab. For use by one thread.

    Parameters
    ----------
    folder
        The session's private folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._numbers = itertools.count()

    def reaches(self, pid: int) -> bool:
        """Whether the rank with this process id has begun to listen."""
        return socket_path(self._folder, pid).exists()

    def ask(self, pids: Iterable[int], question: str, timeout_s: float = 0.5) -> dict[int, Any]:
        """Put a question to the ranks with these process ids; gives the answers of those that answer in time.

        Questions: "state", "stack", "interrupt", "free".
        """
        number = next(self._numbers)
        body = json.dumps({"id": number, "do": question}).encode()
        poller, asked = zmq.Poller(), {}
        for pid in pids:
            if not self.reaches(pid):
                continue
            socket = self._socket(pid)
            try:
                socket.send(body, zmq.NOBLOCK)
            except zmq.Again:
                continue  # it has not answered for long
            poller.register(socket, zmq.POLLIN)
            asked[socket] = pid
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < len(asked) and (left := deadline - time.monotonic()) > 0:
            for socket, _ in poller.poll(int(left * 1e3) + 1):
                reply = json.loads(socket.recv())
                if reply["id"] == number:  # not the late answer to an earlier question
                    answers[asked[socket]] = reply["answer"]
        return answers

    def settle(self, pids: Iterable[int], timeout_s: float = 2.0) -> None:
        """Wait until the ranks have done with all they were asked before.

        A rank that was stopped or silent answers late: it must not revoke the communicators that it gets meanwhile.
        """
        self.ask(pids, "state", timeout_s)

    def _socket(self, pid: int) -> zmq.Socket[bytes]:
        if pid not in self._sockets:
            socket = self._context.socket(zmq.DEALER)
            socket.linger = 0
            socket.sndhwm = 100
            socket.connect(f"ipc://{socket_path(self._folder, pid)}")
            self._sockets[pid] = socket
        return self._sockets[pid]

    def forget(self, pids: Iterable[int]) -> None:
        """Close the sockets to ranks that are gone."""
        for pid in pids:
            socket = self._sockets.pop(pid, None)
            if socket is not None:
                socket.close()

    def close(self) -> None:
        """Close everything."""
        self.forget(list(self._sockets))
        self._context.term()
