"""A real JupyterLab in Chromium: the live chart grows while the training cell runs, and its Stop button ends it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Page

from labkit.cluster.profiles import profile_folder
from tests.conftest import eventually

from .conftest import Seen

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("nothing_left")]

CELLS = [
    "import labkit\nlab = labkit.start(ranks=2)\nlab",
    "live = labkit.live('Long training')",
    "%%px\nfrom labkit import data, train\nset_of_digits = data.load('digits')",
    "%%px\nhistory = train.synchronous(\n"
    "    train.LeNet(), set_of_digits, epochs=100_000, batch_size=32, validate=False, progress=False\n)",
    "ended = lab.pull('(history.stopped, len(history.steps), history.steps.lr[-1])')\nprint(ended)",
]
POINTS = """() => Array.from(document.querySelectorAll('.js-plotly-plot'))
    .map(plot => plot.data.map(trace => trace.x ? trace.x.length : 0))"""
READY = """() => {
    const app = window.jupyterapp;
    if (!app) return false;
    const panel = [...app.shell.widgets('main')].find(w => w.context?.path?.endsWith('.ipynb'));
    if (!panel || panel.context.sessionContext?.session?.kernel?.status !== 'idle') return false;
    app.shell.activateById(panel.id);
    return app.shell.currentWidget === panel;
}"""


@pytest.fixture
def jupyterlab(tmp_path: Path) -> Iterator[str]:
    """Start JupyterLab on a folder with the notebook; gives its address."""
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in CELLS])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, tmp_path / "live.ipynb")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    options = ["--no-browser", "--ip=127.0.0.1", f"--port={port}", "--allow-root", "--ServerApp.port_retries=0"]
    options += ["--IdentityProvider.token=", "--ServerApp.disable_check_xsrf=True", f"--ServerApp.root_dir={tmp_path}"]
    options += ["--LabApp.expose_app_in_browser=True", "--LabApp.news_url=", "--LabApp.check_for_updates_class="]
    options[-1] += "jupyterlab.NeverCheckForUpdate"
    with (tmp_path / "jupyterlab.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options],
            env=os.environ | {"IPYTHONDIR": str(profile_folder("local").parent), "JUPYTER_CONFIG_DIR": str(tmp_path)},
            stdout=log,
            stderr=log,
        )
        try:
            assert eventually(lambda: answers(f"{address}/api"), 60), (tmp_path / "jupyterlab.log").read_text()[-2000:]
            yield address
        finally:
            server.terminate()
            server.wait(30)


def answers(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(url, timeout=2).status == 200)
    except (urllib.error.URLError, OSError):
        return False


def test_traces_grow_while_the_cell_runs_and_stop_ends_it(page: Page, seen: Seen, jupyterlab: str) -> None:
    page.goto(f"{jupyterlab}/lab/tree/live.ipynb")
    page.wait_for_function(READY, timeout=60_000)
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells') }")  # not awaited

    training = page.locator(".jp-CodeCell").nth(3)
    running = training.locator(".jp-InputPrompt", has_text="[*]")
    lengths: list[int] = []
    page.wait_for_function(f"() => Math.max(0, ...({POINTS})().flat()) > 0", timeout=120_000)
    while len(set(lengths)) < 4:
        lengths.append(max(max(trace) for trace in page.evaluate(POINTS)))
        page.wait_for_timeout(300)
        assert running.count() == 1, "the cell must still run while the traces grow"
        assert len(lengths) < 100
    assert lengths == sorted(lengths)
    # Two ranks: their losses, the mean, their step times.
    assert [len(plot) for plot in page.evaluate(POINTS)] == [5]

    width = page.evaluate("() => document.querySelector('.js-plotly-plot')._fullLayout.width")
    assert width > 800, "the chart fills the cell"

    slider = page.locator(".widget-slider .noUi-handle").first
    slider.focus()
    slider.press("ArrowRight")
    page.wait_for_timeout(1000)
    shot = os.environ.get("LABKIT_TEST_SCREENSHOTS")
    if shot:
        page.screenshot(path=f"{shot}/live.png")
    assert running.count() == 1
    page.locator(".widget-button", has_text="Stop").click()
    running.wait_for(state="detached", timeout=20_000)

    ended = page.locator(".jp-CodeCell").nth(4).locator(".jp-OutputArea-output")
    ended.wait_for(timeout=20_000)
    assert ended.inner_text().count("stopped from the notebook") == 2
    # The same chart stays, static now: no widget view, its data in the notebook.
    page.locator(".jp-Notebook .widget-button").wait_for(state="detached", timeout=10_000)
    static = page.locator(".jp-CodeCell").nth(1).locator(".jp-OutputArea-output.js-plotly-plot")
    static.wait_for(timeout=10_000)
    assert max(max(trace) for trace in page.evaluate(POINTS)) >= max(lengths)
    if shot:
        page.screenshot(path=f"{shot}/settled.png")
    assert not seen.outside
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:shutdown-kernel')")
    page.evaluate("() => window.jupyterapp.serviceManager.sessions.shutdownAll()")
