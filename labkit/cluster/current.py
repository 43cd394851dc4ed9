"""The lab of this process: started, joined, found again, stopped at exit."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.cluster.errors import ClusterError
from labkit.cluster.profiles import profile_folders
from labkit.cluster.sessions import adopt, sessions

if TYPE_CHECKING:
    from labkit.cluster.lab import Lab

__all__ = ["become", "connect", "current", "facts", "leave", "start", "stop"]

# A lab that is joined may just be starting.
JOIN_LIMIT_S = 30.0

_current: Lab | None = None
_last_facts: dict[str, list[str]] = {}


def start(
    ranks: int = 4,
    profile: str = "local",
    *,
    timeout: float = 60.0,
    detached: bool = False,
    deadline: float | None = None,
    on_death: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Lab:
    """Start a lab: `ranks` processes that are one MPI world, ready for `%%px` cells.

    A lab that this notebook started before is stopped first.

    Parameters
    ----------
    ranks
        World size; more ranks than cores work, they take turns.
    profile
        ipyparallel profile: "local" is this machine.
    timeout
        Seconds that the ranks have to come up.
    detached
        Let the lab outlive this process (``labkit down`` ends it).
    deadline
        Seconds after which a cell is ended (default: never); ``%%px --deadline`` sets another for one cell.
    on_death
        What is done by itself when a rank's process ends: "heal" (start it again), "shrink" (go on without it), or
        None: nothing, until you call ``lab.heal()`` or ``lab.shrink()``.
    progress
        Called with a few words at each stage.

    Raises
    ------
    PreflightError, ProfileNotFoundError, StartError
        When a check fails, the profile is not there, or the ranks do not come up.  Nothing is left behind.
    """
    from labkit.cluster.bring_up import bring_up
    from labkit.cluster.lab import Lab

    if _current is not None and _current.owned and not _current.session.detached:
        _current.stop()
    world = bring_up(ranks, profile, timeout=timeout, detached=detached, progress=progress or (lambda _: None))
    lab = Lab(world, owned=True, profile=profile, deadline=deadline, on_death=on_death)
    # Who looks at a lab that stays up is another process: it must find ranks that answer.
    lab.prepare(timeout if detached else None)
    return become(lab)


def connect(cluster_id: str | None = None) -> Lab:
    """Join a lab that runs already: from a second notebook, or one started by ``labkit up``.

    Parameters
    ----------
    cluster_id
        Which, when there are several; ``labkit status`` lists them.

    Raises
    ------
    ClusterError
        When there is none, or several and `cluster_id` does not say which.
    """
    from ipyparallel import Client

    from labkit.cluster.bring_up import World, introductions
    from labkit.cluster.lab import Lab

    for folder in profile_folders().values():
        adopt(folder)
    running = [session for session in sessions() if session.running]
    found = [session for session in running if cluster_id in (None, session.cluster_id)]
    if not found:
        known = f"; there is: {', '.join(session.cluster_id for session in running)}" if running else ""
        which = f"lab {cluster_id!r}" if cluster_id else "lab"
        raise ClusterError(f"No {which} is running{known}.", cure="labkit.start(), or in a shell: labkit up")
    if len(found) > 1:
        ids = ", ".join(session.cluster_id for session in found)
        raise ClusterError(f"{len(found)} labs are running: {ids}.", cure=f"labkit.connect({found[-1].cluster_id!r})")
    session = found[0]
    url_file = f"{session.profile_dir}/security/ipcontroller-{session.cluster_id}-client.json"
    deadline = time.monotonic() + JOIN_LIMIT_S
    while not Path(url_file).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    if not Path(url_file).exists():
        raise ClusterError(f"The controller of lab {session.cluster_id} does not come up.", cure="labkit doctor")
    client = Client(url_file, timeout=10)
    while len(client.ids) < session.ranks and time.monotonic() < deadline:
        time.sleep(0.05)
    world = World(session, client, introductions(client, session))
    if session.guard is None:  # of JupyterLab's cluster tab; else its owner has its ranks on record, and may be writing
        session.save()
    return become(Lab(world, owned=False))


def become(lab: Lab) -> Lab:
    """Make `lab` the one that this notebook's `%%px` cells run on."""
    global _current
    _current = lab
    from labkit.cluster.magics import register

    register()
    return lab


def leave(lab: Lab) -> None:
    """`lab` is about to stop: keep what a report wants to know of it."""
    global _current
    if lab is _current:
        _remember_facts(lab)
        _current = None


def current() -> Lab | None:
    """The lab of this notebook, None when there is none."""
    return _current


def stop() -> None:
    """Stop this notebook's lab, if there is one that it started."""
    if _current is not None:
        if _current.owned:
            _current.stop()
        else:
            _current.disconnect()


def facts() -> dict[str, list[str]]:
    """Facts of this notebook's lab, or of the last one after it stopped."""
    if _current is not None:
        _remember_facts(_current)
    return dict(_last_facts)


def _remember_facts(lab: Lab) -> None:
    global _last_facts
    try:
        _last_facts = lab.facts()
    except Exception as error:  # a report without facts beats a lab that cannot be stopped
        print(f"labkit: the ranks did not say what they used ({type(error).__name__}: {error})", file=sys.stderr)


@atexit.register
def _stop_at_exit() -> None:
    if _current is not None and not _current.session.detached:
        stop()
