"""Tensors and arrays as typed MPI buffers.

A contiguous CPU tensor or array is handed to MPI where it lies, without a copy. Anything else (strided views,
conjugated views, CUDA tensors, float16 and bfloat16 in reductions) goes through a contiguous copy and back.
What MPI would treat wrongly is refused here, by name and with the cure.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from labkit.comm.errors import ArgumentError
from labkit.comm.mpi import MPI

if TYPE_CHECKING:
    import torch

    Array: TypeAlias = torch.Tensor | np.ndarray[Any, Any]
else:
    Array: TypeAlias = Any

__all__ = ["KINDS", "OBJECT", "Array", "Buffer", "Kind", "empty_like", "reading", "reducing", "writing"]

LARGEST_COUNT = 2**31 - 1
"""MPI counts elements with a C int; beyond that a message must be cut."""

_address = MPI.memory.fromaddress
_ndarray = np.ndarray
_made = tuple.__new__  # what a NamedTuple's own constructor comes to, without its cost


class Kind:
    """One element type: its name, its number on the wire, and its MPI datatype."""

    __slots__ = ("code", "family", "itemsize", "mpi", "name", "numpy")

    def __init__(self, name: str, code: int, family: str, mpi: MPI.Datatype, numpy: str) -> None:
        self.name = name
        self.code = code
        self.family = family
        """bool, integer, half, float, complex, or opaque (moved, never reduced)."""
        self.mpi = mpi
        """For half and opaque kinds an integer type of the same width: right for moving, never for summing."""
        self.numpy = np.dtype(numpy)
        self.itemsize = self.numpy.itemsize

    def __repr__(self) -> str:
        return self.name


_TABLE = [
    Kind("bool", 1, "bool", MPI.UINT8_T, "uint8"),
    Kind("uint8", 2, "integer", MPI.UINT8_T, "uint8"),
    Kind("int8", 3, "integer", MPI.INT8_T, "int8"),
    Kind("uint16", 4, "integer", MPI.UINT16_T, "uint16"),
    Kind("int16", 5, "integer", MPI.INT16_T, "int16"),
    Kind("uint32", 6, "integer", MPI.UINT32_T, "uint32"),
    Kind("int32", 7, "integer", MPI.INT32_T, "int32"),
    Kind("uint64", 8, "integer", MPI.UINT64_T, "uint64"),
    Kind("int64", 9, "integer", MPI.INT64_T, "int64"),
    Kind("float16", 10, "half", MPI.UINT16_T, "uint16"),
    Kind("bfloat16", 11, "half", MPI.UINT16_T, "uint16"),
    Kind("float32", 12, "float", MPI.FLOAT, "float32"),
    Kind("float64", 13, "float", MPI.DOUBLE, "float64"),
    Kind("complex64", 14, "complex", MPI.C_FLOAT_COMPLEX, "complex64"),
    Kind("complex128", 15, "complex", MPI.C_DOUBLE_COMPLEX, "complex128"),
    Kind("complex32", 16, "opaque", MPI.UINT32_T, "uint32"),
    Kind("float8_e4m3fn", 17, "opaque", MPI.UINT8_T, "uint8"),
    Kind("float8_e5m2", 18, "opaque", MPI.UINT8_T, "uint8"),
    Kind("float8_e4m3fnuz", 19, "opaque", MPI.UINT8_T, "uint8"),
    Kind("float8_e5m2fnuz", 20, "opaque", MPI.UINT8_T, "uint8"),
    Kind("float8_e8m0fnu", 21, "opaque", MPI.UINT8_T, "uint8"),
]
OBJECT = Kind("a pickled Python object", 31, "opaque", MPI.BYTE, "uint8")
KINDS = {kind.code: kind for kind in [*_TABLE, OBJECT]}
_BY_NAME = {kind.name: kind for kind in _TABLE}
FLOAT32 = _BY_NAME["float32"]

_numpy_kinds: dict[Any, Kind] = {
    np.dtype(kind.name): kind for kind in _TABLE if kind.family != "opaque" and kind.name != "bfloat16"
}
_torch_kinds: dict[Any, Kind] = {}
_torch: Any = None
_strided: Any = None


class Buffer(NamedTuple):
    """A tensor or array as MPI sees it.

    `spec` is what mpi4py takes: it does not own the memory. `holder` does, which is `x` itself or a contiguous copy
    of it, so a Buffer must outlive the call it is used in.
    """

    x: Any
    holder: Any
    kind: Kind
    shape: tuple[int, ...]
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    spec: list[Any]

    @property
    def nbytes(self) -> int:
        """Size of the elements in bytes."""
        return self.count * self.kind.itemsize

    def array(self) -> np.ndarray[Any, Any]:
        """The same memory as a flat numpy array, which keeps it alive (half and opaque kinds as integers)."""
        if isinstance(self.holder, np.ndarray):
            return self.holder.reshape(-1).view(self.kind.numpy)
        octets: np.ndarray[Any, Any] = self.holder.detach().reshape(-1).view(_torch.uint8).numpy()
        return octets.view(self.kind.numpy)

    def restore(self) -> None:
        """Copy the result back into `x`, where the operation ran on a copy."""
        if self.holder is self.x:
            return
        if isinstance(self.x, np.ndarray):
            np.copyto(self.x, self.holder, casting="same_kind")
        else:
            self.x.detach().copy_(self.holder)


def reading(x: Array, who: str) -> Buffer:
    """`x` as something to send. `who` starts an error message, such as ``rank 0, send``."""
    if type(x) is _ndarray:
        kind, count = _numpy_kinds.get(x.dtype), x.size
        if kind is not None and x.flags.c_contiguous and count <= LARGEST_COUNT:
            return _made(Buffer, (x, x, kind, x.shape, count, [x, count, kind.mpi]))
    return _buffer(x, who, False, True)


def writing(x: Array, who: str) -> Buffer:
    """`x` as something to receive into: its present values do not count. Call `Buffer.restore` afterwards."""
    if type(x) is _ndarray:
        kind, count = _numpy_kinds.get(x.dtype), x.size
        if kind is not None and x.flags.carray and count <= LARGEST_COUNT:  # contiguous, writable
            return _made(Buffer, (x, x, kind, x.shape, count, [x, count, kind.mpi]))
    return _buffer(x, who, True, False)


def reducing(x: Array, who: str) -> Buffer:
    """`x` as something to reduce in place: float16 and bfloat16 as a float32 copy. Call `Buffer.restore` afterwards."""
    if type(x) is _ndarray:
        kind, count = _numpy_kinds.get(x.dtype), x.size
        if kind is not None and kind.family != "half" and x.flags.carray and count <= LARGEST_COUNT:
            return _made(Buffer, (x, x, kind, x.shape, count, [x, count, kind.mpi]))
    return _buffer(x, who, True, True, True)


def empty_like(x: Array, shape: tuple[int, ...]) -> Array:
    """A new contiguous CPU tensor or array of `x`'s dtype and the given shape."""
    if isinstance(x, np.ndarray):
        return np.empty(shape, x.dtype)
    made: Array = _torch.empty(shape, dtype=x.dtype)
    return made


def _buffer(x: Any, who: str, write: bool, read: bool, widen: bool = False) -> Buffer:
    if _torch is not None and isinstance(x, _torch.Tensor):
        kind = _torch_kinds.get(x.dtype)
        if (
            kind is not None
            and x.is_cpu
            and x.layout is _strided
            and x.is_contiguous()
            and not x.is_neg()
            and not x.is_conj()
            and not (widen and kind.family == "half")
        ):
            count = x.numel()
            memory = _address(x.data_ptr(), count * kind.itemsize)
            buffer = _made(Buffer, (x, x, kind, x.shape, count, [memory, count, kind.mpi]))
        else:
            buffer = _staged_tensor(x, who, write=write, read=read, widen=widen)
    elif isinstance(x, np.ndarray):
        buffer = _numpy_buffer(x, who, write=write, read=read, widen=widen)
    elif _torch is None and "torch" in sys.modules:
        _learn_torch()
        return _buffer(x, who, write, read, widen)
    else:
        raise ArgumentError(
            f"{who}: expected a torch tensor or numpy array, got {type(x).__name__}. "
            "Wrap numbers with torch.tensor(…), or use the …_object functions for other Python objects."
        )
    if buffer.count > LARGEST_COUNT:
        raise ArgumentError(f"{who}: {buffer.count} elements in one message, MPI counts to {LARGEST_COUNT}: cut it.")
    return buffer


def _numpy_buffer(x: np.ndarray[Any, Any], who: str, *, write: bool, read: bool, widen: bool) -> Buffer:
    kind = _numpy_kinds.get(x.dtype)
    if kind is None:
        cure = "convert it with .astype(…)" + (", to native byte order" if not x.dtype.isnative else "")
        raise ArgumentError(f"{who}: numpy dtype {x.dtype.name!r} has no MPI counterpart: {cure}.")
    if write and not x.flags.writeable:
        raise ArgumentError(f"{who}: the array is read-only and cannot be written to: pass a copy, x.copy().")
    holder = x
    if widen and kind.family == "half":
        holder, kind = np.array(x, np.float32, order="C"), FLOAT32
    elif not x.flags.c_contiguous:
        holder = np.array(x, order="C") if read else np.empty(x.shape, x.dtype)
    return Buffer(x, holder, kind, x.shape, x.size, [holder, x.size, kind.mpi])


def _staged_tensor(x: Any, who: str, *, write: bool, read: bool, widen: bool) -> Buffer:
    """The slow path: say why a tensor cannot be used, or make a contiguous CPU copy of it."""
    if x.is_quantized:
        raise ArgumentError(f"{who}: quantised tensors carry a scale that MPI knows nothing of: use x.int_repr().")
    if x.layout is not _strided:
        raise ArgumentError(f"{who}: the tensor is {x.layout}, not dense: use x.to_dense().")
    if x.device.type == "meta":
        raise ArgumentError(f"{who}: the tensor is on the meta device and has no data: make it on a real device.")
    kind = _torch_kinds.get(x.dtype)
    if kind is None:
        raise ArgumentError(f"{who}: dtype {x.dtype} has no MPI counterpart: convert it with x.to(…).")
    data = x.detach()
    if write and any(step == 0 and length > 1 for step, length in zip(x.stride(), x.shape, strict=True)):
        raise ArgumentError(f"{who}: the tensor is expanded, several elements share one place: use x.clone().")
    dtype = x.dtype
    if widen and kind.family == "half":
        dtype, kind = _torch.float32, FLOAT32
    holder = _torch.empty(x.shape, dtype=dtype)
    if read:
        holder.copy_(data)
    count = holder.numel()
    memory = _address(holder.data_ptr(), count * kind.itemsize)
    return Buffer(x, holder, kind, x.shape, count, [memory, count, kind.mpi])


def _learn_torch() -> None:
    """Look torch's dtypes up once it is loaded; labkit.comm does not load it."""
    global _torch, _strided
    _torch = sys.modules["torch"]
    _strided = _torch.strided
    for name, kind in _BY_NAME.items():
        dtype = getattr(_torch, name, None)
        if dtype is not None:
            _torch_kinds[dtype] = kind
