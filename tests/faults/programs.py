"""A model's program as the code of a cell, written with labkit or with plain mpi4py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Literal

from tests.faults.model import (
    FOR_ANY,
    LARGE,
    Begin,
    Call,
    Exchange,
    Finish,
    Op,
    Outcome,
    Program,
    Receive,
    Send,
    outcome,
)

__all__ = ["Library", "cell"]

Library = Literal["labkit", "mpi4py"]

TAGS_EACH = FOR_ANY + 1
"""Each program has tags of its own: a message that one leaves behind is never found by the next."""

_LABKIT = """\
from labkit import comm
me = comm.rank
world, pair = comm.world(), None
"""
_RAW = """\
from mpi4py import MPI
world, pair = MPI.COMM_WORLD, MPI.COMM_NULL
me = world.rank
"""
_BOTH = """\
import numpy as np
def data(tag, value):
    return np.full(131072 if tag in {large} else 1, float(value))
def check(x, value):
    assert x[0] == x[-1] == value, f"got {{x[0]}} and {{x[-1]}} where {{value}} is right"
"""


def cell(program: Program, library: Library, ranks: int, number: int = 0) -> str:
    """The code, the same for all ranks.

    Parameters
    ----------
    program
        What the first ranks do; the others do nothing.
    library
        What to write it with.
    ranks
        How many ranks run the cell.
    number
        Another one for each program that runs on the same ranks.
    """
    write = _Labkit if library == "labkit" else _Raw
    return write(program, outcome(program), TAGS_EACH * number).text(ranks)


class _Writer(ABC):
    """What both libraries have in common."""

    start = ""

    def __init__(self, program: Program, end: Outcome, first_tag: int) -> None:
        self.program = program
        self.end = end
        self.first_tag = first_tag

    def text(self, ranks: int) -> str:
        lines = (self.start + _BOTH).format(large=LARGE).splitlines()
        communicators = []
        if self.program.size < ranks:
            communicators.append(self.split("world", range(self.program.size)))
        if self.program.pair:
            communicators.append(self.split("pair", self.program.pair))
        if self.program.size < ranks:
            lines.append(communicators[0])
            if communicators[1:]:
                lines += [f"if me < {self.program.size}:", *_indented(communicators[1:])]
        else:
            lines += communicators
        for rank, ops in enumerate(self.program.ranks):
            body = [line for index, op in enumerate(ops) for line in self.lines(rank, index, op)]
            lines += [f"{'el' if rank else ''}if me == {rank}:", *_indented(body or ["pass"])]
        return "\n".join(lines) + "\n"

    def lines(self, rank: int, index: int, op: Op) -> list[str]:
        value, wanted = 100 * rank + index + 1, self.end.got.get((rank, index))
        check = [] if wanted is None else [f"check(y, {wanted})"]
        if isinstance(op, Send):
            return [self.send("send", op, value)]
        if isinstance(op, Receive):
            return [f"y = data({op.tag}, 0)", self.receive("recv", op, "y"), *check]
        if isinstance(op, Exchange):
            return [f"y = data({op.receive.tag}, 0)", self.exchange(op, value), *check]
        if isinstance(op, Begin):
            if isinstance(op.operation, Send):
                return [f"request_{op.handle} = {self.send('isend', op.operation, value)}"]
            into = f"y_{op.handle}"
            begin = self.receive("irecv", op.operation, into)
            return [f"{into} = data({op.operation.tag}, 0)", f"request_{op.handle} = {begin}"]
        if isinstance(op, Finish):
            return [self.finish(op), *(line.replace("(y,", f"(y_{op.handle},") for line in check)]
        return self.collective(op, rank)

    def tag(self, tag: int) -> int:
        return self.first_tag + tag

    @abstractmethod
    def split(self, name: str, ranks: Iterable[int]) -> str: ...

    @abstractmethod
    def send(self, name: str, op: Send, value: int) -> str: ...

    @abstractmethod
    def receive(self, name: str, op: Receive, into: str) -> str: ...

    @abstractmethod
    def exchange(self, op: Exchange, value: int) -> str: ...

    @abstractmethod
    def finish(self, op: Finish) -> str: ...

    @abstractmethod
    def collective(self, op: Call, rank: int) -> list[str]: ...


class _Labkit(_Writer):
    start = _LABKIT

    def split(self, name: str, ranks: Iterable[int]) -> str:
        return f"{name} = world.split(0 if me in {tuple(ranks)} else None)"

    def send(self, name: str, op: Send, value: int) -> str:
        return f"comm.{name}(data({op.tag}, {value}), dst={op.dst}, tag={self.tag(op.tag)}, group=world)"

    def receive(self, name: str, op: Receive, into: str) -> str:
        return f"comm.{name}({into}, src={op.src}, tag={self.tag(op.tag)}, group=world)"

    def exchange(self, op: Exchange, value: int) -> str:
        send, receive = op
        return (
            f"comm.sendrecv(data({send.tag}, {value}), {send.dst}, y, {receive.src}, "
            f"sendtag={self.tag(send.tag)}, recvtag={self.tag(receive.tag)}, group=world)"
        )

    def finish(self, op: Finish) -> str:
        return f"request_{op.handle}.wait()"

    def collective(self, op: Call, rank: int) -> list[str]:
        if op.name == "barrier":
            return [f"comm.barrier(group={op.on})"]
        if op.name == "all_reduce":
            size = len(self.program.members(op.on))
            return [f"y = comm.all_reduce(data(0, 1), group={op.on})", f"check(y, {size})"]
        value = 7 if self.program.members(op.on).index(rank) == op.root else 0
        return [f"y = comm.broadcast(data(0, {value}), src={op.root}, group={op.on})", "check(y, 7)"]


class _Raw(_Writer):
    start = _RAW

    def split(self, name: str, ranks: Iterable[int]) -> str:
        return f"{name} = world.Split(0 if me in {tuple(ranks)} else MPI.UNDEFINED)"

    def send(self, name: str, op: Send, value: int) -> str:
        return f"world.{name.capitalize()}(data({op.tag}, {value}), dest={op.dst}, tag={self.tag(op.tag)})"

    def receive(self, name: str, op: Receive, into: str) -> str:
        source = "MPI.ANY_SOURCE" if op.src is None else op.src
        return f"world.{name.capitalize()}({into}, source={source}, tag={self.tag(op.tag)})"

    def exchange(self, op: Exchange, value: int) -> str:
        send, receive = op
        return (
            f"world.Sendrecv(data({send.tag}, {value}), {send.dst}, {self.tag(send.tag)}, "
            f"y, {receive.src}, {self.tag(receive.tag)})"
        )

    def finish(self, op: Finish) -> str:
        return f"request_{op.handle}.Wait()"

    def collective(self, op: Call, rank: int) -> list[str]:
        if op.name == "barrier":
            return [f"{op.on}.Barrier()"]
        if op.name == "all_reduce":
            size = len(self.program.members(op.on))
            return ["y = data(0, 0)", f"{op.on}.Allreduce(data(0, 1), y)", f"check(y, {size})"]
        # MPI lets some ranks leave a broadcast early; which ones is the library's choice. The barrier keeps them.
        value = 7 if self.program.members(op.on).index(rank) == op.root else 0
        return [f"y = data(0, {value})", f"{op.on}.Bcast(y, root={op.root})", f"{op.on}.Barrier()", "check(y, 7)"]


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]
