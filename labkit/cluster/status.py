"""Every lab of this user on this machine, for ``labkit status``."""

from __future__ import annotations

import time
from typing import Any

import psutil

from labkit.cluster.profiles import profile_folders
from labkit.cluster.sessions import adopt, sessions

__all__ = ["machine_status"]

# CPU load is measured over this time; shorter is noise.
SAMPLE_S = 0.2


def machine_status() -> list[dict[str, Any]]:
    """Each lab with its processes: role, pid, resident memory in bytes, CPU load in per cent of a core, state."""
    for folder in profile_folders().values():
        adopt(folder)
    labs = []
    found: list[tuple[dict[str, Any], psutil.Process]] = []
    for session in sessions():
        rows = []
        for mark in session.processes:
            if mark.role.startswith("watcher"):
                continue
            row: dict[str, Any] = {"role": mark.role, "pid": mark.pid, "memory": 0, "cpu": 0.0, "state": "gone"}
            process = mark.process()
            if process is not None:
                process.cpu_percent()
                found.append((row, process))
            rows.append(row)
        state = "running" if session.running else "starting" if session.starting else "dead (labkit clean removes it)"
        labs.append(
            {
                "id": session.cluster_id,
                "state": state,
                "ranks": session.ranks,
                "mpi": session.mpi or "MPI not known yet",
                "owner": session.owner.pid,
                "detached": session.detached,
                "started": session.started,
                "processes": rows,
            }
        )
    if found:
        time.sleep(SAMPLE_S)
    for row, process in found:
        try:
            load = process.cpu_percent()
            state = process.status()
            row.update(memory=process.memory_info().rss, cpu=load)
            row["state"] = "stopped" if state == psutil.STATUS_STOPPED else "busy" if load > 50 else "idle"
        except psutil.NoSuchProcess:
            continue
    return labs
