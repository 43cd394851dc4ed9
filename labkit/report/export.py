"""An executed notebook as one HTML file that needs nothing else."""

from __future__ import annotations

import copy
import html
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import pass_context
from jinja2.runtime import Context
from nbconvert.exporters import HTMLExporter
from nbconvert.filters.markdown_mistune import MarkdownWithMath
from nbformat import NotebookNode
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from traitlets.config import Config

from .formulas import MathRenderer, latex_output

__all__ = ["export", "write_whole"]

PLOTLY = "application/vnd.plotly.v1+json"
_WIDGET = "application/vnd.jupyter.widget-view+json"
_SCRIPT = "application/javascript"
_PRIORITY = [
    PLOTLY,
    "text/html",
    "image/svg+xml",
    "image/png",
    "image/jpeg",
    "text/markdown",
    "text/latex",
    "text/plain",
]
_PYTHON_MAGICS = ("%%px", "%%time", "%%capture")
_PLOTLY_GOES_HERE = "<!-- plotly.js -->"
_TEMPLATES = Path(__file__).parent / "template"


def export(
    notebook: NotebookNode,
    *,
    name: str,
    folder: Path,
    environment: Sequence[tuple[str, str]] = (),
    problem: str | None = None,
) -> str:
    """Turn an executed notebook into self-contained HTML.

    Charts stay interactive by plotly.js, which is put in once and only if there is a chart; formulas become
    MathML; live widgets, which would need a kernel, are left out. A content-security policy in the file
    keeps the browser from asking the network for anything, whatever the outputs hold.

    Parameters
    ----------
    notebook
        The notebook with its outputs; it is not changed.
    name
        Its name, for the title where it has no heading.
    folder
        Where its pictures lie.
    environment
        Rows of the table at the end.
    problem
        What went wrong, to be said at the top.
    """
    notebook = _without_widgets(copy.deepcopy(notebook))
    notebook.metadata["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
    config = Config()
    config.NbConvertBase.display_data_priority = _PRIORITY
    logger = logging.getLogger("labkit.report")
    logger.setLevel(logging.ERROR)  # nbconvert warns of each picture without a description
    exporter = HTMLExporter(
        config=config,
        log=logger,
        template_name="labkit",
        extra_template_basedirs=[str(_TEMPLATES)],
        embed_images=True,
        exclude_anchor_links=True,
        filters={
            "highlight_code": _highlighted,
            "markdown2html": _markdown,
            "latex2html": latex_output,
            "script_json": _script_json,
        },
    )
    resources = {
        "metadata": {"name": name, "path": str(folder)},
        "report": {
            "title": _title(notebook) or name,
            "css": (_TEMPLATES / "labkit" / "report.css").read_text(encoding="utf-8"),
            "code_css": HtmlFormatter(style="default").get_style_defs(".highlight"),
            "environment": list(environment),
            "problem": problem,
        },
    }
    page, _ = exporter.from_notebook_node(notebook, resources=resources)
    # Only now: nbconvert parses the whole page once more, and plotly.js is five million characters of it.
    script = ""
    if any(PLOTLY in data for data in _bundles(notebook)):
        from plotly.offline import get_plotlyjs

        script = f"<script>{get_plotlyjs()}</script>"
    return str(page).replace(_PLOTLY_GOES_HERE, script, 1)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there entire or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp's 0600 would keep a report from being shared
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _bundles(notebook: NotebookNode) -> list[dict[str, Any]]:
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [output.data for cell in code for output in cell.outputs if "data" in output]


def _without_widgets(notebook: NotebookNode) -> NotebookNode:
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if _stays(output)]
    return notebook


def _stays(output: NotebookNode) -> bool:
    """Tell whether an output has something to show without a kernel; take from it what has not."""
    if "data" not in output:
        return True
    widget = output.data.pop(_WIDGET, None) is not None
    output.data.pop(_SCRIPT, None)
    # The text beside a widget is its constructor call, which tells a reader nothing.
    return any(kind != "text/plain" for kind in output.data) if widget else bool(output.data)


def _title(notebook: NotebookNode) -> str:
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for line in cell.source.splitlines():
                if line.startswith("# "):
                    return str(line[2:].strip().replace("`", ""))
    return ""


def _highlighted(source: str, metadata: dict[str, Any] | None = None) -> str:
    """Colour a cell's code; under ``%%px`` and its like stands Python too, which pygments would leave plain."""
    magic, code = "", source
    if source.startswith(_PYTHON_MAGICS):
        first, _, code = source.partition("\n")
        magic = f'<span class="magic">{html.escape(first)}</span>\n'
    lexer = get_lexer_by_name("python" if magic else "ipython3")
    body = highlight(code, lexer, HtmlFormatter(nowrap=True))
    return f'<div class="highlight"><pre>{magic}{body}</pre></div>'


@pass_context
def _markdown(context: Context, source: str) -> str:
    resources = context.get("resources", {})
    cell = context.get("cell", {})
    renderer = MathRenderer(
        escape=False,
        attachments=cell.get("attachments", {}),
        embed_images=True,
        path=resources["metadata"]["path"],
        exclude_anchor_links=True,
    )
    return str(MarkdownWithMath(renderer=renderer).render(source))


def _script_json(value: Any) -> str:
    # Inside <script> the first "</script>" or "<!--" of the data would end or bend it.
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")
