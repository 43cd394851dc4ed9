"""Whatever is killed, nothing of the lab is left; and labs at the same time do not disturb each other."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import labkit
from labkit.cluster.lab import Lab
from labkit.cluster.processes import members
from labkit.cluster.profiles import profile_folder
from labkit.cluster.sessions import clean_stale, private_folder, sessions
from tests.conftest import eventually
from tests.faults.remains import Remains, line, session_of

ENGINE = "labkit.cluster.engine"


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[str]]:
    """A process that has started a lab, said its name, and now computes."""
    program = "import labkit; lab = labkit.start(2); print(lab.session.cluster_id, flush=True)\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait(10)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_owner_leaves_nothing(owner: subprocess.Popen[str], number: signal.Signals) -> None:
    session = session_of(line(owner))
    remains = Remains(session)
    owner.send_signal(number)
    owner.wait(10)
    assert remains.gone()
    assert not session.running


def blocked(lab: Lab) -> int:
    """Rank 0 in a raw receive that nothing answers, rank 1 stopped; gives the pid of a program that rank 0 started."""
    lab.run(
        "import subprocess, sys\n"
        "code = 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)'\n"
        "child = subprocess.Popen([sys.executable, '-c', code], start_new_session=True)",
        ranks=[0],
    )
    (pid,) = lab.pull("child.pid", ranks=[0])
    lab.run("from mpi4py import MPI; MPI.COMM_WORLD.recv(source=1, tag=1)", ranks=[0], block=False)
    os.kill(lab.ranks[1].pid, signal.SIGSTOP)
    return int(pid)


@pytest.mark.parametrize("role", ["controller", "mpiexec"])
def test_a_killed_controller_or_launcher_ends_the_whole_lab_and_says_so(
    role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with labkit.start(2) as lab:
        child = blocked(lab)
        remains = Remains(lab.session)
        assert child in [process.pid for process in members(remains.name)], "what a cell starts ends with the lab"
        mark = lab.session.mark(role)
        assert mark is not None
        os.kill(mark.pid, signal.SIGKILL)
        assert eventually(lambda: not lab.running)
        assert remains.gone()
        said: list[str] = []
        assert eventually(lambda: bool(said.append(capsys.readouterr().err) or "".join(said).endswith("\n")))
        assert "".join(said) == (
            f"labkit: The lab has ended: its {role} (process {mark.pid}) ended. The rest of it is removed. "
            "Cure: lab.restart()\n"
        )
        if role == "controller":
            lab.restart()
            lab.run("mine = mpi_size")
            assert lab.pull("mine") == [2, 2]


@pytest.mark.parametrize("role", ["controller", "mpiexec"])
def test_a_lab_that_stays_up_without_an_owner_ends_as_a_whole(role: str) -> None:
    program = "import labkit; print(labkit.start(2, detached=True).session.cluster_id)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    session = session_of(done.stdout.strip())
    remains = Remains(session)
    assert session.running
    mark = session.mark(role)
    assert mark is not None
    os.kill(mark.pid, signal.SIGKILL)
    assert remains.gone()


CRASH = """
import os, signal, sys, time
import labkit
from labkit.cluster import bring_up, guard
from labkit.cluster.processes import members
from labkit.cluster.sessions import sessions

moment, detached = sys.argv[1:]

def crash(session):
    print(session.cluster_id, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

def note_process(session, pid, role, note=bring_up.note_process):
    note(session, pid, role)
    if role == moment:
        crash(session)

def post(session, post=guard.post):
    post(session)
    if moment == "guard":
        crash(session)

def await_engines(cluster, client, ranks, timeout):
    session = next(session for session in sessions() if session.cluster_id == cluster.cluster_id)
    # Not the launcher, whose command line names the ranks' program too.
    while not any("python" in p.name() and "labkit.cluster.engine" in p.cmdline() for p in members(cluster.cluster_id)):
        time.sleep(0.01)
    crash(session)

bring_up.note_process, bring_up.await_engines, guard.post = note_process, await_engines, post
labkit.start(2, detached=detached == "detached")
"""


@pytest.mark.parametrize(
    ("moment", "kind"),
    [("guard", "owned"), ("controller", "owned"), ("mpiexec", "detached"), ("ranks", "owned")],
)
def test_a_start_that_is_killed_half_way_leaves_nothing(moment: str, kind: str) -> None:
    command = [sys.executable, "-c", CRASH, moment, kind]
    crashed = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    name = line(crashed)
    assert crashed.wait(30) == -signal.SIGKILL
    assert name

    def left() -> list[str]:
        files = [*private_folder().glob(name), *profile_folder("local").rglob(f"*{name}*")]
        return [str(found) for found in [*members(name), *files]]

    eventually(lambda: not left())
    assert not left()


INTERRUPTED = """
import signal, sys
import labkit
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started the tests without it
try:
    labkit.start(2, progress=lambda stage: print(stage, flush=True))
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("program", ["ipyparallel.controller", "labkit.cluster.engine"])
def test_an_interrupted_start_leaves_nothing_at_once(program: str) -> None:
    starting = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert line(starting) == "starting the controller"
    session = next(session for session in sessions() if session.owner.pid == starting.pid)
    assert eventually(lambda: any(runs(process, program) for process in members(session.cluster_id)))
    starting.send_signal(signal.SIGINT)
    while (said := line(starting)).startswith("starting"):
        pass
    assert said == "interrupted"
    assert starting.poll() is None
    assert not members(session.cluster_id)
    assert not session.folder.exists()
    assert not [*Path(session.profile_dir).rglob(f"*{session.cluster_id}*")]
    assert session.guard is not None
    assert session.guard.process() is None
    starting.communicate(timeout=10)


def runs(process: psutil.Process, program: str) -> bool:
    """Whether it is a Python that runs `program`; the ranks' launcher has that on its command line, too."""
    with contextlib.suppress(psutil.Error):
        return "python" in process.name() and program in process.cmdline()
    return False


def test_what_nobody_could_remove_is_removed_at_the_next_start_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    # Neither guard nor death signal: as where a whole user session is killed at once.
    program = (
        "import os, labkit, labkit.cluster.launchers as launchers; launchers.tied_to_parent = lambda: []\n"
        "lab = labkit.start(2); os.kill(lab.session.guard.pid, 9)\n"
        "os.kill(lab.session.mark('mpiexec').pid, 9); print(lab.session.cluster_id, flush=True); os._exit(1)"
    )
    crashed = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    session = session_of(line(crashed))
    crashed.wait(10)
    assert session.alive()
    capsys.readouterr()
    with labkit.start(1) as lab:
        said = capsys.readouterr().err
        assert said.startswith("labkit: removed what an earlier lab had left (")
        assert said.count("\n") == 1
        assert "process" in said
        assert "shared memory" in said
        assert not session.alive()
        assert not session.folder.exists()
        lab.run("mpi_size", show=False)


def test_only_shared_memory_that_nobody_can_use_any_more_is_removed() -> None:
    old, new, mapped = (Path(f"/dev/shm/labkit-test-{os.getpid()}-{kind}") for kind in ("old", "new", "mapped"))
    past = time.time() - 3600
    try:
        for path in (old, new, mapped):
            path.write_bytes(bytes(4096))
        reader = (
            "import mmap, sys; file = open(sys.argv[1], 'r+b'); area = mmap.mmap(file.fileno(), 0)\n"
            "print('mapped', flush=True); sys.stdin.read()"
        )
        holder = subprocess.Popen(
            [sys.executable, "-c", reader, str(mapped)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert line(holder) == "mapped"
        for path in (old, mapped):
            os.utime(path, (past, past))
        removed = clean_stale()
        assert f"shared memory {old}" in removed
        assert not old.exists()
        assert new.exists()
        assert mapped.exists()
        holder.communicate(timeout=10)
    finally:
        for path in (old, new, mapped):
            path.unlink(missing_ok=True)


class Kernel:
    """A real Jupyter kernel."""

    def __init__(self) -> None:
        from jupyter_client.manager import start_new_kernel

        self.manager, self.client = start_new_kernel(kernel_name="python3")

    def run(self, code: str) -> str:
        """What the last line of `code` is, as text."""
        shown: list[str] = []

        def hook(message: dict[str, Any]) -> None:
            kind, content = message["msg_type"], message["content"]
            if kind == "execute_result":
                shown.append(content["data"]["text/plain"])
            assert kind != "error", "\n".join(content.get("traceback", []))

        self.client.execute_interactive(code, timeout=60, output_hook=hook)
        return shown[-1] if shown else ""

    def end(self, now: bool) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=now)


def test_two_notebooks_at_once_and_the_end_of_one_leaves_the_other_alone() -> None:
    kernels = [Kernel(), Kernel()]
    try:
        names = [kernel.run("import labkit; lab = labkit.start(2); lab.session.cluster_id") for kernel in kernels]
        remains = [Remains(session_of(name.strip("'"))) for name in names]
        for kernel in kernels:
            kernel.run("lab.push(mine=3)")
        kernels[0].end(now=False)  # "Shut down kernel"
        assert remains[0].gone()
        clean_stale()
        assert kernels[1].run("lab.pull('mine')") == "[3, 3]"
        kernels[1].end(now=True)  # SIGKILL
        assert remains[1].gone()
    finally:
        for kernel in kernels:
            if kernel.manager.has_kernel:
                kernel.end(now=True)
