"""On which device a rank computes."""

from __future__ import annotations

import torch

from .launched import local_rank

__all__ = ["choose_device"]


def choose_device(no_cuda: bool = False) -> torch.device:
    """Return this rank's device: its GPU, shared in turn where ranks outnumber GPUs, or else the CPU.

    Parameters
    ----------
    no_cuda
        Take the CPU even where there is a GPU.
    """
    if no_cuda or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank() % torch.cuda.device_count())
