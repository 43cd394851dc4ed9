"""Raw calls of mpi4py as they are told: who waits for whom, in which call, since when.

Nothing is put into words until somebody asks. Until then a call that runs is a tuple in `clock.raw`, whose first entry
makes a `Wait` of it and whose second is the time it began (nanoseconds of `time.perf_counter_ns`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import ref

from labkit.comm.mpi import MPI
from labkit.comm.watched_arguments import Parameters, data_of, operator_name
from labkit.comm.watched_groups import Group
from labkit.comm.watched_table import DATA, Entry
from labkit.telemetry.states import Wait

__all__ = ["Begun", "Call", "about_any", "about_call", "about_request", "begin", "begun", "known", "under_way"]

_PEERS = ("dest", "source", "tag", "sendtag", "recvtag")
_BUFFERS = ("buf", "sendbuf", "recvbuf")
_SENT = ("buf", "sendbuf", "obj", "sendobj")


class Call:
    """A method that is watched: the original, its parameters, and how a call of it is told."""

    __slots__ = ("counted", "keep", "kind", "lasting", "name", "original", "parameters")

    def __init__(self, entry: Entry, original: Callable[..., Any]) -> None:
        self.name, self.kind, self.counted = entry.name, entry.kind, entry.counted
        self.original = original
        self.lasting = entry.name.endswith("_init")
        self.parameters = Parameters(original, _wanted(entry))
        self.keep = self.parameters.written("def method(_selfHEADS):\n    return KEPT")
        """Takes the method's own arguments and gives what is kept of them."""

    def named(self, kept: tuple[Any, ...]) -> dict[str, Any]:
        """What was kept, by the parameters' names."""
        return dict(zip(self.parameters.names, kept, strict=True))

    def wait(self, group: Group, kept: tuple[Any, ...], sequence: int | None, since: float) -> Wait:
        """What a rank in this call waits for."""
        told = self.named(kept)
        if self.kind == "collective":
            text = self.signature(kept, group)
            shown: dict[str, Any] = {"signature": text, "text": text}
            if self.counted:
                shown["sequence"] = sequence
            return group.wait(self.name, "collective", since=since, **_data(told), **shown)
        if self.kind == "both":
            sides = (("send", "dest", "sendtag"), ("receive", "source", "recvtag"))
            parts = tuple(
                self._message(side, told[peer], told[tag], told, group, since)
                for side, peer, tag in sides
                if told[peer] != MPI.PROC_NULL
            )
            return group.wait(self.name, "any", since=since, parts=parts, text=self._text(told))
        if self.kind == "send":
            return self._message("send", told["dest"], told.get("tag"), told, group, since)
        if self.kind == "receive":
            return self._message("receive", told["source"], told.get("tag"), told, group, since)
        return group.wait(self.name, "other", since=since, text=f"{self.name}()")

    def signature(self, kept: tuple[Any, ...], group: Group) -> str:
        """What must be the same on all ranks, such as ``Bcast(root=0, float32 × 100)``."""
        told, name = self.named(kept), self.name
        if name == "barrier":
            name = "Barrier"
        shown = []
        if group.remote is None and "root" in told:
            shown.append(f"root={told['root']}")
        if "op" in told:
            shown.append(f"op={operator_name(told['op'])}")
        base = name.removesuffix("_init")
        base = base[1:] if base.startswith("I") else base
        if group.remote is None:
            for parameter, blocks in DATA.get(base.lower(), ()):
                if told.get(parameter) is MPI.IN_PLACE:
                    continue
                data = data_of(told.get(parameter), len(group.members) if blocks else 1)
                if data is not None:
                    shown.append(f"{data[0]} × {data[1]}")
                break
        return f"{name}({', '.join(shown)})"

    def _message(self, kind: str, peer: int, tag: Any, told: dict[str, Any], group: Group, since: float) -> Wait:
        return group.wait(
            self.name,
            kind if peer != MPI.PROC_NULL else "other",
            peer=None if peer in (MPI.ANY_SOURCE, MPI.PROC_NULL) else peer,
            tag=None if tag == MPI.ANY_TAG else tag,
            since=since,
            text=self._text(told),
            **(_data(told, _SENT) if kind == "send" else _data(told) if self.kind != "both" else {}),
        )

    def _text(self, told: dict[str, Any]) -> str:
        shown = [f"{name}={_plainly(name, told[name])}" for name in self.parameters.names if name in _PEERS]
        return f"{self.name}({', '.join(shown)})"


def _wanted(entry: Entry) -> frozenset[str]:
    """The parameters by which a call of this method is told."""
    if entry.kind != "collective":
        objects = {"obj", "sendobj"} if entry.way == "call" else ()  # to begin a request must not cost a look at it
        return frozenset(_PEERS if entry.kind == "other" else {*_PEERS, *_BUFFERS, *objects})
    base = entry.name.removesuffix("_init")
    base = base[1:] if base.startswith("I") else base
    data = DATA.get(base.lower(), ()) if base[:1].isupper() else ()  # lower case: pickled objects, which may differ
    return frozenset({"root", "op", "color", *(name for name, _ in data)})


class Begun(NamedTuple):
    """A request under way: what was begun, and where. It keeps neither the request nor a buffer."""

    request: ref[MPI.Request]
    call: Call
    group: Group
    kept: tuple[Any, ...]
    sequence: int | None

    def over(self) -> bool:
        """Whether it is complete. Open MPI says so, too, of a request that a thread waits for at this moment."""
        request = self.request()
        if request is None or not request:
            return True
        try:
            return bool(request.Get_status())
        except MPI.Exception:
            return True

    def wait(self, since: float = 0.0) -> Wait:
        """What a rank that waits for it waits for."""
        return self.call.wait(self.group, self.kept, self.sequence, since)


begun: dict[int, Begun] = {}
"""By the request's handle, which MPI uses again for a later request."""


class _Sweep:
    """Requests that a program drops without ever waiting for them are forgotten when so many have come together."""

    least = at = 256


def begin(request: MPI.Request, *told: Any) -> None:
    """Remember a request (see `Begun`), unless it is over already."""
    if request:
        begun[request.handle] = tuple.__new__(Begun, (ref(request), *told))
        if len(begun) > _Sweep.at:
            for handle, each in tuple(begun.items()):
                if each.request() is None or (each.over() and not each.call.lasting):
                    del begun[handle]
            _Sweep.at = max(_Sweep.least, 2 * len(begun))


def known(request: MPI.Request) -> Begun | None:
    """What is known of a request."""
    one = begun.get(request.handle)
    return one if one is not None and one.request() is request else None


def under_way() -> tuple[Wait, ...]:
    """Sends and receives that were begun and are not over."""
    return tuple(
        each.wait()
        for each in tuple(begun.values())
        if each.call.kind != "collective" and not each.group.void and not each.over()
    )


def about_call(record: tuple[Any, ...]) -> Wait:
    """The wait of a blocking call: (_, began, group, call, args, sequence)."""
    _, began_ns, group, call, args, sequence = record
    wait: Wait = call.wait(group, call.keep(None, *args), sequence, wall(began_ns))
    return wait


def about_request(record: tuple[Any, ...]) -> Wait:
    """The wait for one request: (_, began, group, begun, name)."""
    _, began_ns, _, one, name = record
    wait: Wait = one.wait(wall(began_ns))
    return replace(wait, text=f"{name} of {wait.text}")


def about_any(record: tuple[Any, ...]) -> Wait:
    """The wait for any of several requests: (_, began, group, requests, name)."""
    _, began_ns, group, requests, name = record
    parts = []
    for request in requests:
        if request:
            one = known(request)
            parts.append(group.wait(name, "other", text="an unknown request") if one is None else one.wait())
    few = ", ".join(part.text for part in parts[:4]) + (f" and {len(parts) - 4} more" if len(parts) > 4 else "")
    wait: Wait = group.wait(name, "any", parts=tuple(parts), since=wall(began_ns), text=f"{name} of {few}")
    return wait


def wall(began_ns: int) -> float:
    """A time of `time.perf_counter_ns` in seconds since the epoch."""
    return time.time() - (time.perf_counter_ns() - began_ns) * 1e-9


def _data(told: dict[str, Any], buffers: tuple[str, ...] = _BUFFERS) -> dict[str, Any]:
    for name in buffers:
        data = data_of(told.get(name))
        if data is not None:
            return {"dtype": data[0], "count": data[1]}
    return {}


def _plainly(name: str, value: Any) -> Any:
    any_of = MPI.ANY_SOURCE if name == "source" else MPI.ANY_TAG if name in ("tag", "recvtag") else None
    if any_of is not None and value == any_of:
        return "any"
    return "none" if name in ("dest", "source") and value == MPI.PROC_NULL else value
