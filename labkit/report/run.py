"""From notebooks to reports."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import nbformat
import nbformat.reader
from nbformat import NotebookNode

from .environment import environment as environment_rows
from .execute import CellProgress, execute
from .export import export, write_whole

__all__ = ["ReportError", "Result", "run"]


class ReportError(Exception):
    """A report that cannot be begun: the notebook or the folder is not as it must be."""

    expected = True  # the command line shows its message alone, without a traceback


@dataclass(frozen=True, slots=True)
class Result:
    """One report.

    Attributes
    ----------
    notebook
        The notebook's file.
    path
        The report's file; it is written also when a cell failed.
    ok
        Whether all cells ran.
    error
        What went wrong, in a line; None if nothing.
    seconds
        How long the notebook ran.
    """

    notebook: Path
    path: Path
    ok: bool
    error: str | None
    seconds: float


def run(
    notebooks: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str] = "reports",
    *,
    timeout: float | None = None,
    progress: Callable[[CellProgress], object] = lambda _: None,
    environment: Mapping[str, str] | None = None,
) -> list[Result]:
    """Execute notebooks, one after the other, and write each as a self-contained HTML file.

    The notebooks themselves are not changed. Each runs in a kernel of its own, in its own folder.

    Parameters
    ----------
    notebooks
        Notebook files.
    out
        Folder for the reports, made if missing; each takes its notebook's name.
    timeout
        Seconds a cell may take; None: no limit.
    progress
        Called before and after each code cell; ``print`` will do.
    environment
        Variables for the kernels besides those of this process.

    Raises
    ------
    ReportError
        Before anything runs, if a file is missing, is no Python notebook, or the folder cannot be written.
    """
    files = [Path(notebook).absolute() for notebook in notebooks]
    read = [_read(file) for file in files]
    targets = _targets(files, Path(out).absolute())
    return [
        _report(file, notebook, target, timeout, progress, environment)
        for file, notebook, target in zip(files, read, targets, strict=True)
    ]


def _report(
    file: Path,
    notebook: NotebookNode,
    target: Path,
    timeout: float | None,
    progress: Callable[[CellProgress], object],
    environment: Mapping[str, str] | None,
) -> Result:
    begun, start = datetime.now(), time.monotonic()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    execution = execute(notebook, file, timeout=timeout, environment=environment, progress=progress)
    seconds = time.monotonic() - start
    rows = environment_rows(execution.facts, begun=begun, seconds=seconds)
    page = export(notebook, name=file.stem, folder=file.parent, environment=rows, problem=execution.error)
    write_whole(target, page)
    return Result(file, target, execution.error is None, execution.error, seconds)


def _read(file: Path) -> NotebookNode:
    try:
        # Not nbformat.read: it logs what is invalid and goes on.
        notebook = nbformat.convert(nbformat.reader.reads(file.read_text(encoding="utf-8")), 4)
        nbformat.validate(notebook)
    except FileNotFoundError:
        raise ReportError(f"There is no notebook {file}.") from None
    except OSError as error:
        raise ReportError(f"{file} cannot be read: {error.strerror}.") from error
    except Exception as error:  # nbformat has many kinds for what is no notebook
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ReportError(f"{file} is not a notebook: {reason}") from error
    language = notebook.metadata.get("kernelspec", {}).get("language") or "python"
    if language != "python":
        raise ReportError(f"{file} is written in {language}; labkit runs Python notebooks.")
    return notebook


def _targets(files: Sequence[Path], out: Path) -> list[Path]:
    targets = [out / f"{file.stem}.html" for file in files]
    for target in targets:
        if targets.count(target) > 1:
            same = " and ".join(str(f) for f, t in zip(files, targets, strict=True) if t == target)
            raise ReportError(f"{same} would both become {target}: report them into different folders.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReportError(f"The folder {out} cannot be made: {error.strerror}.") from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise ReportError(f"The folder {out} cannot be written to.")
    return targets
