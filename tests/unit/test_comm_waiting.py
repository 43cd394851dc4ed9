"""The wait, its deadline and what it tells, without any other rank."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from labkit.comm.errors import ArgumentError, CommError, DeadlineError, MismatchError
from labkit.comm.waiting import Wait, clock, deadline, until, waiting_now

WAIT = Wait("recv", 2, peer=1, tag=7, text="recv(src=1, tag=7)")


def test_a_wait_ends_when_the_condition_holds() -> None:
    event = threading.Event()
    threading.Timer(0.02, event.set).start()
    until(event.is_set, lambda: WAIT, timeout=30)
    assert event.is_set()
    assert waiting_now() is None


def test_a_deadline_names_rank_operation_peer_tag_and_cure() -> None:
    with pytest.raises(DeadlineError, match=r"rank 2 waited .* recv\(src=1, tag=7\) .*'world' .*Let rank 1 make"):
        until(lambda: False, lambda: WAIT, timeout=0.01)
    assert waiting_now() is None


def test_the_nearest_of_nested_deadlines_counts_and_ends_with_its_block() -> None:
    with deadline(1000):
        with deadline(0.01), deadline(500), pytest.raises(DeadlineError):
            until(lambda: False, lambda: WAIT)
        event = threading.Event()
        threading.Timer(0.05, event.set).start()
        until(event.is_set, lambda: WAIT)


def test_a_call_that_another_thread_ended_at_the_deadline_is_told_even_if_it_returned() -> None:
    with pytest.raises(DeadlineError, match="in Ssend"), deadline(0):
        clock.broken = DeadlineError("rank 2 waited 1 s in Ssend(dest=1, tag=0)")
    with deadline(1000):
        pass


@pytest.mark.parametrize("seconds", [-1, float("nan")])
def test_a_deadline_that_is_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(ArgumentError), deadline(seconds):
        pass


def test_another_thread_can_ask_what_the_main_thread_waits_for() -> None:
    seen: list[Wait] = []

    def ask() -> None:
        end = time.monotonic() + 20
        while not seen and time.monotonic() < end:
            now = waiting_now()
            if now is not None:
                seen.append(now)

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: bool(seen), lambda: WAIT, timeout=20)
    thread.join()
    assert (seen[0].operation, seen[0].peer, seen[0].tag) == ("recv", 1, 7)
    assert seen[0].place.startswith("test_comm_waiting.py:")
    assert abs(seen[0].since - time.time()) < 30


def test_a_line_of_a_notebook_is_named_as_a_cell_line() -> None:
    namespace = {"until": until, "WAIT": WAIT, "DeadlineError": DeadlineError}
    source = "\n\nuntil(lambda: False, lambda: WAIT, 0.005)"
    with pytest.raises(DeadlineError, match="cell line 3"):
        exec(compile(source, "/tmp/ipykernel_12/345.py", "exec"), namespace)


def test_every_error_is_a_comm_error() -> None:
    assert all(issubclass(error, CommError) for error in (ArgumentError, DeadlineError, MismatchError))


def run_alone(code: str) -> None:
    """In a process of its own. Open MPI leaves its shared-memory file behind when it runs without mpiexec, so none."""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_importing_comm_starts_no_mpi_and_loads_no_torch() -> None:
    code = (
        "import sys; from labkit import comm; comm.ALGORITHMS; comm.DeadlineError; comm.spent();"
        "assert not {'torch', 'mpi4py.MPI'} & set(sys.modules); import labkit.comm.buffers;"
        "assert 'torch' not in sys.modules; assert set(comm.__all__) <= set(dir(comm))"
    )
    run_alone(code)


def test_every_public_name_resolves() -> None:
    code = "from labkit import comm; [getattr(comm, name) for name in comm.__all__]; assert comm.size == 1"
    run_alone(code)
