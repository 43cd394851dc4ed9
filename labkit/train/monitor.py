"""What each rank's process uses of the machine, sampled by a thread while it trains."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, fields

import numpy as np
import psutil
import torch

__all__ = ["PERIOD_S", "Monitor", "Resources"]

PERIOD_S = 1.0
"""Time between two samples, s."""


@dataclass(slots=True)
class Resources:
    """What a rank's process used, each a float64 array with one number a sample.

    Attributes
    ----------
    time_s
        When it was sampled, in seconds since the run began.
    cpu_percent
        Of one core, in mean since the sample before; more than 100 where several threads compute.
    memory_mb
        Resident memory, 10⁶ bytes.
    gpu_memory_mb
        Memory that torch holds on the rank's GPU, 10⁶ bytes; NaN without a GPU.
    gpu_percent
        Share of the time in which the GPU computed, for whichever process; NaN where nobody can tell.
    """

    time_s: np.ndarray
    cpu_percent: np.ndarray
    memory_mb: np.ndarray
    gpu_memory_mb: np.ndarray
    gpu_percent: np.ndarray

    @classmethod
    def of(cls, samples: list[tuple[float, ...]]) -> Resources:
        """Make arrays of samples that are tuples in the order of the attributes."""
        return cls(*np.array(samples, np.float64).reshape(-1, len(fields(cls))).T)

    def __len__(self) -> int:
        return len(self.time_s)


class Monitor:
    """A thread that samples this process once a period, and at its end.

    Parameters
    ----------
    device
        Where the rank computes.
    period_s
        Time between two samples, s.
    """

    def __init__(self, device: torch.device, period_s: float = PERIOD_S) -> None:
        self._device, self._period_s = device, period_s
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first call only begins to count
        self._begun = time.perf_counter()
        self._samples: list[tuple[float, ...]] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="labkit monitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, after a last sample."""
        self._closing.set()
        self._thread.join()

    def resources(self) -> Resources:
        """Return the samples so far."""
        return Resources.of(list(self._samples))

    def _work(self) -> None:
        while not self._closing.wait(self._period_s):
            self._sample()
        self._sample()

    def _sample(self) -> None:
        cpu_percent, memory = self._process.cpu_percent(), self._process.memory_info().rss
        elapsed = time.perf_counter() - self._begun
        self._samples.append((elapsed, cpu_percent, memory / 1e6, *gpu(self._device)))


def gpu(device: torch.device) -> tuple[float, float]:
    """Return the memory that torch holds on a GPU in 10⁶ bytes, and its utilisation in percent; NaN: not known."""
    if device.type != "cuda":
        return math.nan, math.nan
    try:
        percent = float(torch.cuda.utilization(device))
    except (ImportError, RuntimeError, OSError):  # needs NVIDIA's management library, and its permission
        percent = math.nan
    return torch.cuda.memory_reserved(device) / 1e6, percent
