"""How torch's profiler sees the calls of the back end."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

__all__ = ["profiled"]


def profiled(operation: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let torch's profiler see a call, as ``mpi:all_reduce`` with the shapes of its tensors."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(self: Any, *args: Any, **options: Any) -> Any:
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


def _tensors_in(args: Any) -> list[torch.Tensor]:
    """The tensors of the last argument that has any, which is the input."""
    for arg in reversed(args):
        if isinstance(arg, torch.Tensor):
            return [arg]
        if isinstance(arg, list) and arg and isinstance(arg[0], torch.Tensor):
            return arg
        if isinstance(arg, list) and arg:
            return _tensors_in(arg)
    return []
