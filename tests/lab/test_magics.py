"""`%%px` and `%lab` in a real Jupyter kernel."""

from __future__ import annotations

import tempfile
import textwrap
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

from labkit.cluster.errors import ClusterError
from labkit.cluster.magics import parse_ranks


def execute(*cells: str, allow_errors: bool = False) -> list[Any]:
    """Run cells in a kernel of their own and give each one's outputs."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = NotebookClient(notebook, timeout=60, kernel_name="python3", allow_errors=allow_errors)
    return [cell.outputs for cell in client.execute().cells]


def text(outputs: Any) -> str:
    return "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)


def test_px_waits_prints_in_rank_order_and_shows_values_and_rich_outputs() -> None:
    start, printed, value, rich, line, card, stopped = execute(
        "import labkit\nlab = labkit.start(2)\nlab",
        "%%px\nimport time\ntime.sleep(0.6 * (1 - mpi_rank))\nprint('hello from', mpi_rank)",
        "%%px --ranks 1\nmpi_rank * 100",
        "%%px\nfrom IPython.display import HTML, display\ndisplay(HTML(f'<b>{mpi_rank}</b>'))",
        "%px print('short')",
        "%lab",
        "lab.stop()",
    )
    assert "ready" in start[0]["data"]["text/html"]
    assert text(printed) == "rank 0 │ hello from 0\nrank 1 │ hello from 1"
    assert text(value) == "rank 1 │ 100"
    assert [o["data"].get("text/html") for o in rich if "text/html" in o["data"]] == ["<b>0</b>", "<b>1</b>"]
    assert text(line) == "rank 0 │ short\nrank 1 │ short"
    assert "text/html" in card[0]["data"]
    assert text(stopped) == ""


def test_an_error_in_px_shows_the_ranks_own_traceback_and_the_kernel_goes_on() -> None:
    *_, failed, after = execute(
        "import labkit\nlab = labkit.start(2)",
        "%%px\nvalue = 1\nif mpi_rank == 1:\n    raise ValueError('boom')",
        "%px print(value)",
        allow_errors=True,
    )
    error = failed[-1]
    assert error["ename"] == "CellError"
    assert "rank 1 failed first: ValueError: boom" in error["evalue"]
    shown = "\n".join(error["traceback"])
    assert "rank 1 failed first" in shown
    assert "rank 0: finished" in shown
    assert text(after) == "rank 0 │ 1\nrank 1 │ 1"


def test_px_without_a_lab_says_how_to_get_one() -> None:
    (failed,) = execute("from labkit.cluster.magics import register; register()\n%px 1", allow_errors=True)
    assert "labkit.start(ranks=4)" in failed[-1]["evalue"]


def test_noblock_returns_at_once_and_wait_shows_the_output() -> None:
    _, first, second = execute(
        "import labkit\nlab = labkit.start(2)",
        "%%px --noblock\nimport time; time.sleep(0.5); print('late', mpi_rank)",
        "lab.wait()",
    )
    assert "late" not in text(first)
    assert text(second) == "rank 0 │ late 0\nrank 1 │ late 1"


@pytest.mark.parametrize(
    ("written", "meant"), [("all", [0, 1, 2, 3]), ("2", [2]), ("0,3", [0, 3]), ("1-3", [1, 2, 3]), (":2", [0, 1])]
)
def test_ranks_are_named_by_numbers_and_ranges(written: str, meant: list[int]) -> None:
    assert parse_ranks(written, 4) == meant


def test_ranks_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ClusterError, match="names no ranks"):
        parse_ranks("one", 4)


def test_output_is_shown_while_the_cell_still_runs() -> None:
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(30)
        client.execute_interactive("import labkit\nlab = labkit.start(2)", timeout=60)
        shown: list[str] = []

        def note(message: dict[str, Any]) -> None:
            if message["msg_type"] in ("display_data", "update_display_data"):
                shown.append(message["content"]["data"]["text/plain"])
                if "second" not in shown[-1]:
                    (Path(folder) / "go").touch()  # the ranks go on only when their first line has been seen

        with tempfile.TemporaryDirectory() as folder:
            cell = f"""%%px
            import time
            from pathlib import Path
            print("first")
            while not Path("{folder}/go").exists():
                time.sleep(0.02)
            print("second")"""
            client.execute_interactive(textwrap.dedent(cell), timeout=30, output_hook=note)
        assert shown[0].splitlines()[0] in ("rank 0 │ first", "rank 1 │ first")  # whoever was heard first
        assert "second" not in shown[0]
        assert shown[-1] == "rank 0 │ first\nrank 0 │ second\nrank 1 │ first\nrank 1 │ second"
        client.execute_interactive("lab.stop()", timeout=30)
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
