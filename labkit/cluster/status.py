"""Every lab of this user on this machine, for ``labkit status``."""

from __future__ import annotations

import time
from typing import Any

import psutil

from labkit.cluster.profiles import profile_folders
from labkit.cluster.seen import Seen, in_words
from labkit.cluster.sessions import Session, adopt, sessions
from labkit.cluster.wardens import Wardens
from labkit.telemetry.states import RankState

__all__ = ["machine_status"]

# CPU load is measured over this time; shorter is noise.
SAMPLE_S = 0.2


def machine_status() -> list[dict[str, Any]]:
    """Each lab with its processes: role, pid, resident memory in bytes, CPU load in per cent of a core, state.

    Ranks say themselves what they do: their state is one of those of `labkit.cluster.card.RankStatus`, and "doing"
    tells where they compute, or whom they wait for.
    """
    for folder in profile_folders().values():
        adopt(folder)
    labs: list[dict[str, Any]] = []
    found: list[tuple[dict[str, Any], psutil.Process]] = []
    known = sessions()
    for session in known:
        rows = []
        for mark in session.processes:
            if mark.role.startswith("watcher"):
                continue
            row: dict[str, Any] = {"role": mark.role, "pid": mark.pid, "memory": 0, "cpu": 0.0, "state": "gone"}
            row["doing"] = ""
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
    for session, lab in zip(known, labs, strict=True):
        if session.running:
            ask_ranks(session, lab["processes"])
    return labs


def ask_ranks(session: Session, rows: list[dict[str, Any]]) -> None:
    """Put what the ranks say of themselves into their rows."""
    ranks = {int(row["role"].split()[1]): row for row in rows if row["role"].startswith("rank ")}
    wardens = Wardens(session.folder)
    try:
        answers = wardens.ask([row["pid"] for row in ranks.values() if row["state"] in ("busy", "idle")], "state")
    finally:
        wardens.close()
    seen = {}
    for rank, row in ranks.items():
        if row["pid"] in answers:
            state = RankState.from_json(answers[row["pid"]])
            seen[rank] = Seen("finished" if state.doing == "idle" else "running", state)
        elif row["state"] in ("stopped", "gone"):
            seen[rank] = Seen(row["state"])
        else:
            seen[rank] = Seen("silent" if wardens.reaches(row["pid"]) else "running")
    for rank, row in ranks.items():
        row["state"], row["doing"] = in_words(rank, seen, time.time())
