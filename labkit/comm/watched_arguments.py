"""What is kept of a call's arguments, and how it is told: never a buffer, and in well under a microsecond."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py.util.dtlib import to_numpy_dtype

from labkit.comm.mpi import MPI
from labkit.comm.watched_sizes import pickled

__all__ = ["Parameters", "data_of", "essential", "operator_name"]

_PLAIN = frozenset({int, bool, type(None), str, MPI.Op, type(MPI.IN_PLACE), type(MPI.BOTTOM)})
_PREDEFINED = {each.handle: each for each in vars(MPI).values() if isinstance(each, MPI.Datatype)}
_OPERATORS = {each.handle: name for name, each in vars(MPI).items() if isinstance(each, MPI.Op)}


def essential(value: Any) -> Any:
    """`value` itself where it is small; of an array its type and size; of anything else nothing."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    reader = _readers.get(kind)
    if reader is None:
        if len(_readers) > 200:  # classes made in a notebook again and again must not pile up
            _readers.clear()
        reader = _readers[kind] = _reader(value)
    return reader(value)


class Parameters:
    """A method's parameters as source code, out of which functions with the same parameters are written.

    Attributes
    ----------
    heads, passed
        How they are declared, and how they are passed on; each begins with a comma unless it is empty.
    names, kept
        Those that are kept, and the expression for the tuple of what is kept of them. Of two buffers the second one
        counts only if the first is IN_PLACE.
    space
        The names that the source refers to.
    """

    def __init__(self, method: Callable[..., Any], wanted: frozenset[str]) -> None:
        self.space: dict[str, Any] = {
            "_ndarray": np.ndarray,
            "_essential": essential,
            "_IN_PLACE": MPI.IN_PLACE,
            "_PLAIN": _PLAIN,
            "_pickled": pickled,
        }
        self.heads = self.passed = ""
        values: dict[str, str] = {}
        first = ""
        for each in list(inspect.signature(method).parameters.values())[1:]:
            name = each.name
            star = "*" if each.kind is each.VAR_POSITIONAL else ""
            self.space[f"_default_{name}"] = each.default
            self.heads += f", {star}{name}" + ("" if each.default is each.empty else f"=_default_{name}")
            self.passed += f", {star}{name}"
            if name in wanted and name in ("buf", "sendbuf", "recvbuf"):
                read = f"('array', {name}.dtype, {name}.size) if type({name}) is _ndarray else _essential({name})"
                in_place = f"{name} if {name} is _IN_PLACE else {read}"
                values[name] = f"({read}) if {first} is _IN_PLACE else None" if first else in_place
                first = first or name
            elif name in wanted and name in ("obj", "sendobj"):
                values[name] = f"_pickled({name})"
            elif name in wanted:
                values[name] = f"{name} if type({name}) in _PLAIN else _essential({name})"
        self.names = tuple(values)
        self.kept = f"({''.join(f'{value}, ' for value in values.values())})"

    def written(self, source: str, **space: Any) -> Callable[..., Any]:
        """The function ``method`` that `source` defines, with ``HEADS``, ``PASSED`` and ``KEPT`` filled in.

        It is written as source, as `dataclasses` does, so that Python itself puts arguments to their names: that is
        much quicker than to take any arguments and look for the names.
        """
        for mark, text in (("HEADS", self.heads), ("PASSED", self.passed), ("KEPT", self.kept)):
            source = source.replace(mark, text)
        names = self.space | space
        exec(compile(source, f"{__file__} (written)", "exec"), names)
        made: Callable[..., Any] = names["method"]
        return made


def data_of(kept: Any, blocks: int = 1) -> tuple[str, int] | None:
    """Type and number of elements of a buffer as `essential` kept it; None if they cannot be told.

    Parameters
    ----------
    kept
        What `essential` gave.
    blocks
        The number of equal blocks in the buffer; a count that the call gives explicitly is of one block.
    """
    if not isinstance(kept, tuple):
        return None
    if kept[0] == "array":
        return (_name(kept[1]), kept[2] // blocks) if isinstance(kept[2], int) else None
    inner = data_of(kept[1])
    types = [item for item in kept[2:] if isinstance(item, (str, MPI.Datatype)) or _is_derived(item)]
    counts = [item for item in kept[2:] if type(item) is int]
    if len(types) + len(counts) < len(kept) - 2 or len(types) > 1 or len(counts) > 1:
        return None  # displacements, or counts for each rank
    if not types:
        return inner and (inner[0], counts[0] if counts else inner[1] // blocks)
    told = _type_of(types[0])
    if told is None:
        return None
    name, size, factor = told
    if counts:
        return name, counts[0] * factor
    return inner and (name, inner[1] * _size_of_name(inner[0]) * factor // (size * blocks))


def operator_name(op: Any) -> str:
    """The name of a reduction; all that a user defined are alike."""
    return _OPERATORS.get(op.handle, "user's") if isinstance(op, MPI.Op) else "user's"


def _array(value: Any) -> Any:
    return "array", value.dtype, value.size


def _tensor(value: Any) -> Any:
    return "array", value.dtype, value.numel()


def _bytes(value: Any) -> Any:
    return "array", "uint8", len(value)


def _spec(value: Any) -> Any:
    """A buffer with count and type; derived types are resolved now, since the user may free them."""
    if len(value) == 2:
        return "spec", essential(value[0]), _item(value[1])
    if len(value) == 3:
        return "spec", essential(value[0]), _item(value[1]), _item(value[2])
    return None


def _item(value: Any) -> Any:
    kind = type(value)
    if kind is int or kind is str:
        return value
    return _resolved(value) if kind is MPI.Datatype else None


def _nothing(_: Any) -> Any:
    return None


_readers: dict[type, Callable[[Any], Any]] = {
    list: _spec,
    tuple: _spec,
    bytes: _bytes,
    bytearray: _bytes,
    np.ndarray: _array,
}


def _reader(value: Any) -> Callable[[Any], Any]:
    if hasattr(value, "dtype") and callable(getattr(value, "numel", None)):
        return _tensor
    if hasattr(value, "dtype") and isinstance(getattr(value, "size", None), int):
        return _array
    return _nothing


def _resolved(datatype: MPI.Datatype) -> Any:
    """A predefined type as it is; a derived one as ("derived", its only basic type, how many of them) or None."""
    if datatype.handle in _PREDEFINED:
        return datatype
    try:
        basic = _basic(datatype)
    except (MPI.Exception, ValueError):
        return None
    return None if basic is None else ("derived", basic, datatype.Get_size() // basic.Get_size())


def _basic(datatype: MPI.Datatype) -> MPI.Datatype | None:
    while datatype.handle not in _PREDEFINED:
        datatype = datatype.decode()[0]
        if not isinstance(datatype, MPI.Datatype):  # a structure of several
            return None
    return _PREDEFINED[datatype.handle]


def _is_derived(item: Any) -> bool:
    return isinstance(item, tuple) and bool(item) and item[0] == "derived"


def _type_of(item: Any) -> tuple[str, int, int] | None:
    """Name of the basic type, size of one element in bytes, and how many of the basic type make one element."""
    factor = 1
    if isinstance(item, str):
        try:
            item = MPI.Datatype.fromcode(item)
        except (ValueError, KeyError):
            return None
    elif isinstance(item, tuple):
        _, item, factor = item
    name = _name(item)
    return name, item.Get_size() * factor, factor


def _name(dtype: Any) -> str:
    if isinstance(dtype, str):
        return dtype
    if isinstance(dtype, MPI.Datatype):
        try:
            return str(to_numpy_dtype(dtype).name)
        except ValueError:
            return dtype.Get_name().removeprefix("MPI_").lower()
    return str(dtype).removeprefix("torch.")


def _size_of_name(name: str) -> int:
    try:
        return np.dtype(name).itemsize
    except TypeError:
        return {"bfloat16": 2}.get(name, 1)
