"""Steps and wishes over real sockets, whole, broken, too many and cut off."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from labkit import telemetry
from labkit.telemetry import COLUMNS, Collector, ControlReader, ControlState, Emitter, Endpoints

pytestmark = pytest.mark.timeout(60)


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition never held"
        time.sleep(0.005)


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[Collector]:
    with Collector(2, tmp_path) as collector:
        yield collector
        assert collector.error is None


@pytest.fixture(autouse=True)
def disconnected() -> Iterator[None]:
    yield
    telemetry.disconnect()


def push(endpoints: Endpoints, *frames: bytes) -> None:
    """Send a message of any kind to a collector."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.linger = 5000
        socket.connect(endpoints.metrics)
        socket.send_multipart(frames)


def test_every_step_logged_arrives_in_order(collector: Collector) -> None:
    emitters = [Emitter(collector.endpoints.metrics, rank, interval=0.0) for rank in range(2)]
    for step in range(300):
        for emitter in emitters:
            emitter.log(step=step, loss=1 / (step + 1), samples=64)
    for emitter in emitters:
        emitter.flush()
        assert (emitter.sent, emitter.dropped) == (300, 0)
        emitter.close()
    until(lambda: collector.counts.received == 600)
    assert collector.counts.lost == 0
    for rank in range(2):
        assert list(collector.store.series(rank)["step"]) == list(range(300))
        assert np.allclose(collector.store.series(rank)["loss"], 1 / np.arange(1, 301))


def test_steps_wait_for_the_batch_and_flush_sends_the_tail(collector: Collector) -> None:
    emitter = Emitter(collector.endpoints.metrics, 0, interval=3600.0)
    for step in range(7):
        emitter.log(step=step)
    assert emitter.sent == 0
    emitter.flush()
    assert emitter.sent == 7
    until(lambda: collector.counts.received == 7)
    emitter.close()


def test_a_rank_that_ends_without_flushing_keeps_no_step_to_itself(tmp_path: Path) -> None:
    program = """
import sys
from labkit import telemetry
telemetry.connect(telemetry.Endpoints(*sys.argv[1:3]), rank=1)
for step in range(123):
    telemetry.emitter().log(step=step, loss=1.0)
"""
    with Collector(2, tmp_path) as collector:
        arguments = [collector.endpoints.metrics, collector.endpoints.control]
        subprocess.run([sys.executable, "-c", program, *arguments], check=True, timeout=30)
        until(lambda: collector.counts.received == 123)
        assert collector.counts.lost == 0


def test_plain_tcp_addresses_work_too(tmp_path: Path) -> None:
    with Collector(1, tmp_path, host="127.0.0.1") as collector:
        assert collector.endpoints.metrics.startswith("tcp://127.0.0.1:")
        telemetry.connect(collector.endpoints, rank=0)
        emitter = telemetry.emitter()
        assert emitter is not None
        emitter.log(step=0)
        emitter.flush()
        until(lambda: collector.counts.received == 1)


def test_a_full_queue_drops_and_counts_and_does_not_block(tmp_path: Path) -> None:
    emitter = Emitter(f"ipc://{tmp_path}/nobody", 0, interval=0.0, high_water=3)
    begin = time.monotonic()
    for step in range(50):
        emitter.log(step=step)
    assert emitter.sent + emitter.dropped == 50
    assert emitter.sent == 3
    assert emitter.dropped == 47
    assert time.monotonic() - begin < 30  # it came back; how fast is the benchmark's matter
    emitter._context.destroy(linger=0)  # nobody will ever read the three


def test_the_notebook_learns_how_many_steps_were_dropped(tmp_path: Path) -> None:
    emitter = Emitter("tcp://127.0.0.1:9", 0, interval=0.0, high_water=1)
    emitter.log(step=0)
    emitter.log(step=1)
    assert emitter.dropped == 1
    emitter.close()
    with Collector(1, tmp_path) as collector:
        second = Emitter(collector.endpoints.metrics, 0, interval=3600.0)
        second.dropped = 5
        second.log(step=0)
        second.close()
        until(lambda: collector.counts.received == 1)
        assert collector.counts.dropped == collector.store.dropped == 5


def test_steps_logged_after_closing_count_as_dropped(collector: Collector) -> None:
    emitter = Emitter(collector.endpoints.metrics, 0)
    emitter.close()
    assert emitter.closed
    emitter.log(step=0)
    emitter.flush()
    assert (emitter.sent, emitter.dropped) == (0, 1)


@pytest.mark.parametrize(
    "frames",
    [
        (b"",),
        (b"garbage",),
        (b"x" * 200, b"y" * 64),
        (b"LKT1" + b"\0" * 52, b"too short"),
        (b"LKT1", b"", b"one too many"),
    ],
)
def test_garbage_is_counted_and_harms_nothing(collector: Collector, frames: tuple[bytes, ...]) -> None:
    push(collector.endpoints, *frames)
    until(lambda: collector.counts.malformed == 1)
    emitter = Emitter(collector.endpoints.metrics, 0)
    emitter.log(step=0)
    emitter.close()
    until(lambda: collector.counts.received == 1)


def test_a_rank_outside_the_world_is_counted_as_malformed(collector: Collector) -> None:
    emitter = Emitter(collector.endpoints.metrics, 2)
    emitter.log(step=0)
    emitter.close()
    until(lambda: collector.counts.malformed == 1)
    assert collector.store.received == 0


def test_a_step_number_that_is_no_number_is_malformed_but_a_diverged_loss_is_not(
    collector: Collector,
) -> None:
    emitter = Emitter(collector.endpoints.metrics, 0)
    emitter.log(step=0, loss=float("inf"))
    emitter.flush()
    emitter.log(step=float("nan"))  # type: ignore[arg-type]
    emitter.close()
    until(lambda: collector.counts.malformed == 1)
    assert collector.store.series(0)["loss"].tolist() == [float("inf")]


def test_a_rank_killed_in_mid_run_leaves_its_steps_and_the_others_go_on(tmp_path: Path) -> None:
    program = """
import sys, time
from labkit import telemetry
telemetry.connect(telemetry.Endpoints(*sys.argv[1:3]), rank=1)
for step in range(10**9):
    telemetry.emitter().log(step=step)
    time.sleep(0.001)
"""
    with Collector(2, tmp_path) as collector:
        arguments = [collector.endpoints.metrics, collector.endpoints.control]
        rank1 = subprocess.Popen([sys.executable, "-c", program, *arguments])
        try:
            until(lambda: len(collector.store.series(1)["step"]) > 10)
        finally:
            os.kill(rank1.pid, signal.SIGKILL)
            rank1.wait(10)
        other = Emitter(collector.endpoints.metrics, 0)
        other.log(step=0)
        other.close()
        until(lambda: collector.store.latest(0) is not None)
        assert len(collector.store.series(1)["step"]) > 10
        assert collector.error is None


def test_a_notebook_that_goes_away_does_not_stop_the_rank(tmp_path: Path) -> None:
    collector = Collector(1, tmp_path)
    emitter = Emitter(collector.endpoints.metrics, 0, interval=0.0, high_water=2)
    emitter.log(step=0)
    until(lambda: collector.counts.received == 1)
    collector.close()
    for step in range(1, 200):
        emitter.log(step=step)
    assert emitter.sent + emitter.dropped == 200
    assert emitter.dropped > 0
    emitter._context.destroy(linger=0)


def test_a_run_begun_is_kept_apart_at_once(collector: Collector) -> None:
    emitter = Emitter(collector.endpoints.metrics, 0)
    emitter.begin_run(1000.0)
    emitter.log(step=5)
    begun = emitter.begin_run()
    emitter.log(step=0)
    emitter.close()
    until(lambda: collector.counts.received == 2)
    assert collector.store.run == begun
    assert collector.store.series(0)["step"].tolist() == [0]


def test_rank_0_hears_stop_and_learning_rate_and_the_others_do_not(collector: Collector) -> None:
    rank0, rank1 = ControlReader(collector.endpoints.control), ControlReader(None)
    assert rank0.latest() == ControlState(stop=False, lr=None)
    collector.send_control(lr=0.5)
    until(lambda: rank0.latest() == ControlState(stop=False, lr=0.5))
    collector.send_control(stop=True, lr=0.5)
    until(lambda: rank0.latest().stop)
    assert rank1.latest() == ControlState()
    rank0.close()
    rank1.close()


def test_a_click_before_rank_0_connects_is_not_lost(collector: Collector) -> None:
    collector.send_control(stop=True)
    for _ in range(2):  # each who comes is told, not only the first
        reader = ControlReader(collector.endpoints.control)
        until(lambda reader=reader: reader.latest().stop)  # type: ignore[misc]
        reader.close()


def test_an_old_stop_does_not_stop_the_next_run(collector: Collector) -> None:
    telemetry.connect(collector.endpoints, rank=0)
    emitter, control = telemetry.emitter(), telemetry.control()
    assert emitter is not None
    assert control is not None
    emitter.begin_run()
    collector.send_control(stop=True)
    until(lambda: control.latest().stop)
    emitter.begin_run()
    assert not control.latest().stop
    # Nor does it when the wish is sent again, as it is to everyone who subscribes.
    late = ControlReader(collector.endpoints.control)
    late.begin_run(time.time())
    until(lambda: (late.latest(), late._made > 0)[1])
    assert not late.latest().stop
    collector.send_control(stop=True)
    until(lambda: control.latest().stop)
    late.close()


def test_a_broken_control_message_is_counted_and_ignored(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        publisher.linger = 0
        publisher.bind(f"ipc://{tmp_path}/c")
        reader = ControlReader(f"ipc://{tmp_path}/c")

        def heard() -> bool:
            publisher.send(b'{"stop": true')
            return not reader.latest().stop and reader.malformed > 0

        until(heard)
        reader.close()


@pytest.mark.parametrize("lr", [0.0, -1.0, float("nan"), float("inf")])
def test_a_learning_rate_that_is_none_is_refused(collector: Collector, lr: float) -> None:
    with pytest.raises(ValueError, match="learning rate"):
        collector.send_control(lr=lr)


def test_connect_twice_replaces_and_disconnect_is_harmless(collector: Collector) -> None:
    telemetry.disconnect()
    telemetry.connect(collector.endpoints, rank=1)
    first = telemetry.emitter()
    telemetry.connect(collector.endpoints, rank=1)
    assert first is not None
    assert first.closed
    assert telemetry.emitter() is not first
    telemetry.disconnect()
    telemetry.disconnect()
    assert telemetry.emitter() is None
    assert telemetry.control() is None


def test_an_address_that_is_none_is_refused_with_the_cure() -> None:
    with pytest.raises(ValueError, match=r"rank 3.*endpoints"):
        Emitter("nowhere", 3)
    with pytest.raises(ValueError, match="endpoints"):
        telemetry.connect(Endpoints("nowhere", "nowhere"), rank=0)
    assert telemetry.emitter() is None


def test_sockets_lie_in_a_folder_only_its_owner_may_enter(tmp_path: Path) -> None:
    with Collector(1, tmp_path / "new") as collector:
        assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
        assert len(list((tmp_path / "new").iterdir())) == 2
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(RuntimeError, match="closed"):
        collector.send_control(stop=True)


def test_a_folder_open_to_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(PermissionError, match="chmod 700"):
        Collector(1, tmp_path / "open")


def test_a_folder_with_a_long_path_is_refused_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shorter folder"):
        Collector(1, tmp_path / ("x" * 100))


def test_two_collectors_in_one_folder_do_not_take_each_others_steps(tmp_path: Path) -> None:
    with Collector(1, tmp_path) as one, Collector(1, tmp_path) as two:
        emitter = Emitter(one.endpoints.metrics, 0)
        emitter.log(step=0)
        emitter.close()
        until(lambda: one.counts.received == 1)
        assert two.counts.received == 0


def test_a_rank_needs_neither_torch_nor_plotly_for_it() -> None:
    program = (
        "import sys, labkit.telemetry; "
        "print([m for m in ('torch', 'plotly', 'ipyparallel', 'mpi4py') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_columns_are_what_a_step_holds_without_its_rank() -> None:
    assert tuple(telemetry.Step.__dataclass_fields__)[1:] == COLUMNS


def test_facts_are_kept_once_and_in_order() -> None:
    telemetry.facts.clear()
    telemetry.facts.record("data set", "digits")
    telemetry.facts.record("seed", "0")
    telemetry.facts.record("data set", "digits")
    telemetry.facts.record("data set", "mnist")
    facts = telemetry.facts.recorded()
    assert facts == {"data set": ["digits", "mnist"], "seed": ["0"]}
    facts["seed"].append("changed")
    assert telemetry.facts.recorded()["seed"] == ["0"]
    telemetry.facts.clear()
