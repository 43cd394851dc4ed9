"""Reports of small notebooks in real kernels: whole, failing, hanging, dying, interrupted."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from datetime import datetime
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from labkit import report
from labkit.report.export import export, write_whole
from labkit.report.run import ReportError

pytestmark = pytest.mark.timeout(100)


def write(path: Path, *cells: str) -> Path:
    nbformat.write(new_notebook(cells=[new_code_cell(cell) for cell in cells]), path)
    return path


def gone(pid: int) -> bool:
    """Wait for a process to end, up to ten seconds."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


CHILD = """
import subprocess
from pathlib import Path
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
Path("child").write_text(str(child.pid))
"""
STUBBORN = CHILD.replace('["sleep", "600"]', '["sh", "-c", "trap \'\' TERM; sleep 600; sleep 600"]')


def test_a_notebook_becomes_a_report_and_stays_as_it_was(tmp_path: Path) -> None:
    path = write(
        tmp_path / "one.ipynb", "# first line\nprint(6 * 7)", "", "from pathlib import Path; print(Path.cwd())"
    )
    before = path.read_bytes()
    told: list[report.CellProgress] = []
    (result,) = report.run([path], tmp_path / "new" / "out", progress=told.append)
    assert result.ok, result.error
    assert result.path == tmp_path / "new" / "out" / "one.html"
    html = result.path.read_text()
    assert "<pre>42\n</pre>" in html
    assert f"<pre>{tmp_path}\n</pre>" in html
    assert path.read_bytes() == before
    assert [(p.cell, p.cells, p.seconds is None) for p in told] == [
        (1, 2, True),
        (1, 2, False),
        (2, 2, True),
        (2, 2, False),
    ]
    assert str(told[0]) == "one.ipynb: cell 1 of 2: # first line"
    assert [p.name for p in result.path.parent.iterdir()] == ["one.html"]


def test_old_outputs_are_not_taken_for_new_ones(tmp_path: Path) -> None:
    path = tmp_path / "old.ipynb"
    cells = [new_code_cell("1 / 0"), new_code_cell("x", outputs=[new_output("stream", text="from before")])]
    nbformat.write(new_notebook(cells=cells), path)
    (result,) = report.run([path], tmp_path)
    assert "from before" not in result.path.read_text()


def test_a_failing_cell_ends_the_run_and_leaves_no_process(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.ipynb", STUBBORN, "raise ValueError('<why>')", "print('never ' + 'here')")
    (result,) = report.run([path], tmp_path)
    assert not result.ok
    assert result.error == "Cell 2 (raise ValueError('<why>')): ValueError: <why>"
    html = result.path.read_text()
    assert "ValueError: &lt;why&gt;" in html
    assert "never here" not in html
    assert gone(int((tmp_path / "child").read_text()))


def test_a_cell_that_takes_too_long_is_ended_and_said(tmp_path: Path) -> None:
    path = write(tmp_path / "slow.ipynb", CHILD, "import time; time.sleep(600)")
    (result,) = report.run([path], tmp_path, timeout=5)
    assert not result.ok
    assert "took longer than the 5 s" in (result.error or "")
    assert "CellTimeoutError" in result.path.read_text()
    assert gone(int((tmp_path / "child").read_text()))


def test_a_kernel_that_dies_is_said_and_its_children_go_too(tmp_path: Path) -> None:
    path = write(tmp_path / "dies.ipynb", CHILD, "import os; os.kill(os.getpid(), 9)")
    (result,) = report.run([path], tmp_path)
    assert not result.ok
    assert "kernel died in cell 2" in (result.error or "")
    assert "DeadKernelError" in result.path.read_text()
    assert gone(int((tmp_path / "child").read_text()))


def test_ctrl_c_ends_the_kernel_and_its_children(tmp_path: Path) -> None:
    cell = "import os, time; Path('kernel').write_text(str(os.getpid())); time.sleep(600)"
    path = write(tmp_path / "long.ipynb", CHILD, cell)
    program = textwrap.dedent("""
        import sys
        from labkit import report
        report.run([sys.argv[1]], sys.argv[2])
    """)
    process = subprocess.Popen([sys.executable, "-c", program, str(path), str(tmp_path)], stderr=subprocess.PIPE)
    try:
        end = time.monotonic() + 60
        while not (tmp_path / "kernel").exists() or not (tmp_path / "kernel").read_text():
            assert time.monotonic() < end, "the cell never began"
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode != 0
    assert b"KeyboardInterrupt" in errors
    assert gone(int((tmp_path / "kernel").read_text()))
    assert gone(int((tmp_path / "child").read_text()))
    assert not (tmp_path / "long.html").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no notebook"),
        ("", "not a notebook"),
        ("{broken", "not a notebook"),
        ("[1, 2]", "not a notebook"),
        ('{"cells": 3, "nbformat": 4, "nbformat_minor": 5, "metadata": {}}', "not a notebook"),
        (
            json.dumps(
                {**new_notebook(), "metadata": {"kernelspec": {"name": "j", "display_name": "J", "language": "julia"}}}
            ),
            "written in julia",
        ),
    ],
)
def test_what_is_no_notebook_is_refused_before_anything_runs(tmp_path: Path, content: str | None, said: str) -> None:
    good = write(tmp_path / "good.ipynb", "open('ran', 'w')")
    bad = tmp_path / "bad.ipynb"
    if content is not None:
        bad.write_text(content)
    with pytest.raises(ReportError, match=said) as refusal:
        report.run([good, bad], tmp_path / "out")
    assert "bad.ipynb" in str(refusal.value)
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()


def test_a_folder_given_for_a_notebook_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="cannot be read"):
        report.run([tmp_path])


def test_two_notebooks_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    paths = [write(tmp_path / folder / "same.ipynb") for folder in "ab"]
    with pytest.raises(ReportError, match="would both become"):
        report.run(paths, tmp_path / "out")


def test_an_output_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "one.ipynb")
    (tmp_path / "out").write_text("a file")
    with pytest.raises(ReportError, match="cannot be made"):
        report.run([path], tmp_path / "out")


def test_a_report_that_cannot_be_written_whole_leaves_the_former_one(tmp_path: Path) -> None:
    target = tmp_path / "one.html"
    target.write_text("the former")
    with pytest.raises(UnicodeEncodeError):
        write_whole(target, "new \udc80")
    assert target.read_text() == "the former"
    assert list(tmp_path.iterdir()) == [target]


def test_a_report_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    write_whole(tmp_path / "one.html", "text")
    (tmp_path / "plain").touch()
    assert os.stat(tmp_path / "one.html").st_mode == os.stat(tmp_path / "plain").st_mode


def test_plotly_is_put_in_only_where_there_is_a_chart(tmp_path: Path) -> None:
    chart = {"data": [{"y": [1, 2]}], "layout": {"title": {"text": "</script><script>alert(1)</script>"}}}
    output = new_output("display_data", data={"application/vnd.plotly.v1+json": chart, "text/plain": "Figure()"})
    with_chart = new_notebook(cells=[new_code_cell("fig", outputs=[output, output])])
    html = export(with_chart, name="chart", folder=tmp_path)
    assert html.count("plotly.js v") >= 1
    assert html.count('class="chart"') == 2
    assert "<script>alert(1)" not in html
    assert "Figure()" not in html
    without = export(new_notebook(cells=[new_markdown_cell("# Words")]), name="words", folder=tmp_path)
    assert len(without) < 100_000
    assert "<title>Words</title>" in without
    for page in (html, without):
        assert "Content-Security-Policy" in page
        for library in ("require.min.js", "MathJax.js", "mermaid", "html-manager"):
            assert f"/{library}" not in page


def test_widgets_are_left_out_and_the_notebook_given_is_not_changed(tmp_path: Path) -> None:
    view = {"application/vnd.jupyter.widget-view+json": {"model_id": "x"}, "text/plain": "VBox(children=())"}
    script = {"application/javascript": "alert(1)", "text/plain": "<IPython.core.display.Javascript object>"}
    outputs = [new_output("display_data", data=data) for data in (view, script)]
    notebook = new_notebook(cells=[new_code_cell("w", outputs=outputs)], metadata={"widgets": {"state": 1}})
    html = export(notebook, name="w", folder=tmp_path)
    assert "VBox" not in html
    assert "alert(1)" not in html
    assert "widgets" in notebook.metadata
    assert notebook.cells[0].outputs[0].data == view


def test_the_environment_table_says_what_the_run_was_made_with(tmp_path: Path) -> None:
    facts = {"ranks": ["4 × 1 thread"], "MPI": ["Open MPI 5"], "data set": ["mnist", "<digits>"], "seed": []}
    rows = report.environment(facts, begun=datetime.now(), seconds=75)
    table = dict(rows)
    assert table["Ranks"] == "4 × 1 thread"
    assert table["Data set"] == "mnist, <digits>"
    assert table["Duration"] == "1 min 15 s"
    assert "Seed" not in table
    for what in ("Date", "CPU", "Memory", "System", "Python", "labkit", "torch", "mpi4py", "ipyparallel", "plotly"):
        assert table[what]
    html = export(new_notebook(), name="e", folder=tmp_path, environment=rows)
    assert "&lt;digits&gt;" in html


def test_code_under_a_parallel_magic_is_coloured_and_escaped(tmp_path: Path) -> None:
    html = export(new_notebook(cells=[new_code_cell("%%px\nif 1 < 2: pass")]), name="px", folder=tmp_path)
    assert '<span class="magic">%%px</span>' in html
    assert '<span class="k">if</span>' in html
    assert "&lt;" in html


def test_progress_names_what_follows_a_magic(tmp_path: Path) -> None:
    path = write(tmp_path / "px.ipynb", "%%capture\nprint(1)")
    told: list[str] = []
    report.run([path], tmp_path, progress=lambda progress: told.append(str(progress)))
    assert told[0] == "px.ipynb: cell 1 of 1: %%capture  print(1)"


def test_only_a_cell_that_is_marked_may_fail(tmp_path: Path) -> None:
    for name, tags in (("marked", ["raises-exception"]), ("plain", [])):
        failing = new_code_cell("1 / 0", metadata={"tags": tags})
        cells = [failing, new_code_cell("print('reached', 6 * 7)")]
        nbformat.write(new_notebook(cells=cells), tmp_path / f"{name}.ipynb")
    marked, plain = report.run([tmp_path / "marked.ipynb", tmp_path / "plain.ipynb"], tmp_path / "out")
    assert marked.ok, marked.error
    assert "division by zero" in marked.path.read_text() and "reached 42" in marked.path.read_text()
    assert not plain.ok and "ZeroDivisionError" in str(plain.error)
    assert "reached 42" not in plain.path.read_text()
