"""A report opened from a file with the network off: everything is there, and nothing is asked for."""

from __future__ import annotations

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from playwright.sync_api import Page

from labkit import report

from .conftest import Seen

pytestmark = pytest.mark.timeout(180)

WORDS = r"""# A small report

It gains when $T_{sync} < (R-1)\,T_{comp}$, and the whole time is

$$T_{dist} = \frac{N}{B \cdot R}\,\left(T_{comp} + T_{sync}\right)$$

Prices stay: 5 dollars. Code stays as it is: `$x$`.

| rank | loss |
|---|---|
| 0 | 0.25 |
"""

LIVE = """
import tempfile, time
from labkit import telemetry
from labkit.charts import Live

collector = telemetry.Collector(2, tempfile.mkdtemp())
emitters = [telemetry.Emitter(collector.endpoints.metrics, rank) for rank in range(2)]
live = Live(collector, 2)
"""

TRAIN = """
begun = time.time()
for emitter in emitters:
    emitter.begin_run(begun)
for step in range(120):
    for emitter in emitters:
        emitter.log(step=step, loss=2 / (step + 1), compute_s=0.002, wait_s=0.001, samples=64)
    time.sleep(0.002)
for emitter in emitters:
    emitter.close()
live.settle()
collector.close()
"""

PLAIN = """
import plotly.graph_objects as go
go.Figure(go.Bar(y=[3, 1, 2]), layout={"title": {"text": "</script><b>escaped</b>"}})
"""

OTHERS = """
import ipywidgets
from IPython.display import HTML, Latex, display
display(ipywidgets.VBox([ipywidgets.Button(description="a button")]))
display(Latex(r"$\\alpha + \\beta$"))
display(HTML("<table><tr><td>mine</td></tr></table>"))
print("<b>not bold</b> \\x1b[31mred\\x1b[0m")
"""

SPY = """
from IPython.display import HTML
HTML("<img src='https://example.org/spy.png'><link rel='stylesheet' href='https://example.org/spy.css'>"
     "<script>fetch('https://example.org/spy.json'); window.spied = true</script><iframe src='https://example.org'>")
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, report.Result]:
    folder = tmp_path_factory.mktemp("report")
    small = [new_markdown_cell(WORDS), *map(new_code_cell, (LIVE, TRAIN, PLAIN, OTHERS))]
    failing = [new_code_cell("print('before')"), new_code_cell("1 / 0"), new_code_cell("print('after')")]
    paths = []
    for name, cells in (("small", small), ("spying", [new_code_cell(SPY)]), ("failing", failing)):
        path = folder / f"{name}.ipynb"
        nbformat.write(new_notebook(cells=cells), path)
        paths.append(path)
    results = report.run(paths, folder / "out", timeout=60)
    return {result.notebook.stem: result for result in results}


@pytest.fixture
def offline(page: Page) -> Page:
    page.context.set_offline(True)
    return page


def test_charts_formulas_and_tables_are_there_with_the_network_off(
    offline: Page, reports: dict[str, report.Result], seen: Seen
) -> None:
    result = reports["small"]
    assert result.ok, result.error
    offline.goto(result.path.as_uri())
    offline.wait_for_function("document.querySelectorAll('.js-plotly-plot .main-svg').length >= 2", timeout=30_000)
    traces = offline.evaluate("[...document.querySelectorAll('.js-plotly-plot')].map(p => p.data.map(t => t.y.length))")
    assert traces == [[120] * 5, [3]]
    drawn = offline.evaluate("document.querySelectorAll('.js-plotly-plot .scatterlayer .js-line').length")
    assert drawn == 5
    assert offline.locator("math").count() == 3  # two in the words, one in the outputs
    assert offline.locator("math[display=block]").count() == 1
    assert offline.locator("code", has_text="$x$").count() == 1
    assert offline.title() == "A small report"
    assert offline.locator("section.environment td").count() > 5
    assert "mine" in offline.inner_text("main")
    assert seen.outside == []
    assert seen.errors == []


def test_text_is_escaped_and_widgets_leave_nothing_behind(offline: Page, reports: dict[str, report.Result]) -> None:
    offline.goto(reports["small"].path.as_uri())
    offline.wait_for_selector(".js-plotly-plot .main-svg")
    outputs = " ".join(offline.locator(".jp-OutputArea-output").all_inner_texts())
    assert "<b>not bold</b>" in outputs
    assert offline.locator("b", has_text="not bold").count() == 0
    assert offline.locator(".ansi-red-fg", has_text="red").count() == 1
    assert "VBox(" not in outputs
    assert "Live chart" not in outputs


def test_an_output_that_asks_the_network_is_refused_though_the_network_is_on(
    page: Page, reports: dict[str, report.Result], seen: Seen
) -> None:
    refused: list[str] = []
    answered: list[str] = []
    page.on("requestfailed", lambda request: refused.append(f"{request.url} {request.failure}"))
    page.on("response", lambda response: answered.append(response.url))
    page.goto(reports["spying"].path.as_uri())
    page.wait_for_function("window.spied")
    assert [url for url in answered if "example.org" in url] == []
    assert all(line.endswith(" csp") for line in refused if "example.org" in line)
    for what in ("spy.png", "spy.css", "spy.json"):
        assert any(what in error and "Content Security Policy" in error for error in seen.errors), what


def test_a_failing_cell_gives_a_report_up_to_there(
    offline: Page, reports: dict[str, report.Result], seen: Seen
) -> None:
    result = reports["failing"]
    assert not result.ok
    assert result.error is not None
    assert "ZeroDivisionError" in result.error
    offline.goto(result.path.as_uri())
    text = offline.inner_text("main")
    assert "before" in text
    assert "ZeroDivisionError" in offline.inner_text(".problem")
    assert "division by zero" in offline.inner_text("[data-mime-type='application/vnd.jupyter.stderr']")
    assert offline.locator("pre", has_text="after").count() == 1  # the code, not its output
    assert result.path.stat().st_size < 200_000  # no chart, so no plotly.js
    assert seen.errors == []
    assert seen.outside == []
