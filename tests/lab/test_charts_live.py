"""The live chart, without a browser: in a script, and in a real kernel."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from labkit.charts import Live
from labkit.charts.controls import AS_SET, Controls
from labkit.charts.live import PLOTLY, chart_bundle
from labkit.telemetry import Collector, Emitter

pytestmark = pytest.mark.timeout(100)

VIEW = "application/vnd.jupyter.widget-view+json"

SETUP = """
import tempfile, time
from labkit import telemetry
from labkit.charts import Live

def until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "the condition never held"
        time.sleep(0.01)

def begin():
    global collector, emitters, live
    collector = telemetry.Collector(2, tempfile.mkdtemp(dir="."))
    emitters = [telemetry.Emitter(collector.endpoints.metrics, rank) for rank in range(2)]
    live = Live(collector, 2, title="First")

def train(steps):
    begun = time.time()
    for emitter in emitters:
        emitter.begin_run(begun)
    for step in range(steps):
        for emitter in emitters:
            emitter.log(step=step, loss=1 / (step + 1), compute_s=0.001, samples=64)
    for emitter in emitters:
        emitter.flush()
"""


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "the condition never held"
        time.sleep(0.005)


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[Collector]:
    with Collector(2, tmp_path) as collector:
        yield collector


def log(collector: Collector, rank: int, steps: int) -> None:
    emitter = Emitter(collector.endpoints.metrics, rank)
    for step in range(steps):
        emitter.log(step=step, loss=1.0, compute_s=0.002, samples=10)
    emitter.close()


class Notebook:
    """A kernel in which cells run one by one."""

    def __init__(self, client: NotebookClient) -> None:
        self.client = client

    def run(self, code: str) -> nbformat.NotebookNode:
        """Run a cell and return it with its outputs, which later cells may still change."""
        cells = self.client.nb.cells
        cells.append(new_code_cell(code))
        return self.client.execute_cell(cells[-1], len(cells) - 1)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    folder = str(tmp_path_factory.mktemp("nb"))
    client = NotebookClient(new_notebook(), timeout=60, kernel_name="python3", resources={"metadata": {"path": folder}})
    with client.setup_kernel(cwd=folder):
        notebook = Notebook(client)
        notebook.run(SETUP)
        yield notebook


def test_in_a_script_nothing_is_shown_and_nothing_fails(
    collector: Collector, capsys: pytest.CaptureFixture[str]
) -> None:
    live = Live(collector, 2)
    assert "waiting for the first step" in repr(live)
    log(collector, 0, 20)
    until(lambda: collector.counts.received == 20)
    live.settle()
    figure = live.figure()
    assert len(figure.data[0].y) == 20
    assert "step 20" in figure.layout.title.subtitle.text
    assert "20 steps received, 0 dropped" in live.summary()
    live._ipython_display_()
    live.close()
    assert "Live chart" in capsys.readouterr().out


def test_the_kept_chart_holds_plain_numbers(collector: Collector) -> None:
    log(collector, 0, 5)
    log(collector, 1, 5)
    until(lambda: collector.counts.received == 10)
    bundle = chart_bundle(Live(collector, 2).figure())
    traces = bundle[PLOTLY]["data"]
    assert traces[0]["x"] == [0, 1, 2, 3, 4]
    assert traces[3]["y"] == [2, 2, 2, 2, 2]
    assert "10 steps received" in bundle["text/plain"]


def test_a_diverged_loss_is_a_gap_in_the_kept_chart(collector: Collector) -> None:
    emitter = Emitter(collector.endpoints.metrics, 0)
    emitter.log(step=0, loss=float("nan"))
    emitter.log(step=1, loss=float("inf"))
    emitter.close()
    until(lambda: collector.counts.received == 2)
    assert chart_bundle(Live(collector, 2).figure())[PLOTLY]["data"][0]["y"] == [None, None]


def test_the_live_chart_becomes_a_static_one_that_the_notebook_keeps(notebook: Notebook) -> None:
    shown = notebook.run("begin()")
    assert VIEW in shown.outputs[0].data
    notebook.run("live.settle()")
    assert VIEW in shown.outputs[0].data  # nothing was trained: the chart still waits
    notebook.run("train(200); live.settle()")
    (output,) = shown.outputs
    assert VIEW not in output.data
    chart = output.data[PLOTLY]
    assert [len(trace["y"]) for trace in chart["data"]] == [200] * 5
    assert chart["layout"]["title"]["text"] == "First"
    assert "400 steps received, 0 dropped" in chart["layout"]["title"]["subtitle"]["text"]


def test_a_later_run_takes_the_place_of_the_former_in_the_same_chart(notebook: Notebook) -> None:
    shown = notebook.run("begin()")
    notebook.run("train(50); live.settle()")
    notebook.run("train(30); until(lambda: live._live); assert live.error is None; live.settle()")
    assert len(shown.outputs) == 1
    assert len(shown.outputs[0].data[PLOTLY]["data"][0]["y"]) == 30


def test_the_chart_is_drawn_while_a_cell_still_runs(notebook: Notebook) -> None:
    notebook.run("begin()")
    notebook.run("""
train(40)
until(lambda: len(live._widget.data[0].y) == 40 and "80 steps received" in live._controls.status.value)
assert not live._controls.stop.disabled
""")


def test_an_error_while_drawing_is_shown_and_the_next_drawing_goes_on(notebook: Notebook) -> None:
    notebook.run("begin()")
    notebook.run("""
whole = telemetry.Counts.lost
telemetry.Counts.lost = property(lambda self: 1 / 0)
train(5)
until(lambda: live.error is not None)
assert "ZeroDivisionError" in live._controls.status.value
telemetry.Counts.lost = whole
train(6)
until(lambda: live.error is None and len(live._widget.data[0].y) == 6)
""")


def test_stop_and_learning_rate_reach_rank_0(notebook: Notebook) -> None:
    notebook.run("begin(); reader = telemetry.ControlReader(collector.endpoints.control)")
    notebook.run("""
train(5)
until(lambda: not live._controls.stop.disabled)
live._controls.slider.value = 0.01
until(lambda: abs((reader.latest().lr or 0) - 0.01) < 1e-9)
assert not reader.latest().stop
live._controls.stop.click()
until(lambda: reader.latest().stop)
assert abs(reader.latest().lr - 0.01) < 1e-9 and live._controls.stop.disabled
train(5)
until(lambda: not live._controls.stop.disabled)
assert live._controls.stop.description == "Stop" and live._controls.lr is None
""")


def test_controls_rest_until_a_run_begins_and_say_what_went_wrong() -> None:
    told: list[tuple[bool, float | None]] = []
    controls = Controls(lambda stop, lr: told.append((stop, lr)))
    assert controls.stop.disabled
    assert controls.slider.disabled
    controls.begin()
    controls.slider.value = 0.1
    controls.stop.click()
    assert told == [(False, pytest.approx(0.1)), (True, pytest.approx(0.1))]
    controls.begin()
    assert controls.value.value == AS_SET

    def closed(stop: bool, lr: float | None) -> None:
        raise RuntimeError("the collector is <closed>")

    controls = Controls(closed)
    controls.begin()
    controls.stop.click()
    assert "the collector is &lt;closed&gt;" in controls.status.value
