"""Runs a notebook in a kernel of its own, and leaves no process behind."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import os
import queue
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
import psutil
from jupyter_core.utils import ensure_async
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

__all__ = ["CellProgress", "Execution", "execute"]

# Asked of labkit only where the notebook started a lab: otherwise the question would load all of ipyparallel.
_LABKIT = "__import__('sys').modules['labkit']"
_STARTED = "'labkit.cluster' in __import__('sys').modules"
_FACTS = f"__import__('json').dumps({_LABKIT}.facts()) if {_STARTED} else '{{}}'"
_STOP = f"{_LABKIT}.stop() if {_STARTED} else None"
FACTS_S, STOP_S = 15.0, 20.0
"""Seconds the kernel has to tell what it used, and to stop its lab."""


@dataclass(frozen=True, slots=True)
class CellProgress:
    """How far a notebook is: told before each code cell (`seconds` None) and after it.

    Attributes
    ----------
    notebook
        The notebook's file.
    cell, cells
        Number of the code cell, from 1, and how many there are.
    line
        The cell's first line.
    seconds
        How long it took; None: it begins.
    """

    notebook: Path
    cell: int
    cells: int
    line: str
    seconds: float | None = None

    def __str__(self) -> str:
        line = self.line if len(self.line) <= 60 else self.line[:59] + "…"
        took = "" if self.seconds is None else f"  {self.seconds:.1f} s"
        return f"{self.notebook.name}: cell {self.cell} of {self.cells}: {line}{took}"


class _RefusalError(Exception):
    """The kernel's answer to a question of ours was an error."""


@dataclass
class Execution:
    """What came of running a notebook: its outputs are in the notebook."""

    error: str | None = None
    facts: dict[str, list[str]] = field(default_factory=dict)


def execute(
    notebook: NotebookNode,
    path: Path,
    *,
    timeout: float | None = None,
    environment: Mapping[str, str] | None = None,
    progress: Callable[[CellProgress], object] = lambda _: None,
) -> Execution:
    """Run all cells in a fresh kernel, in the folder of the notebook, up to the first that fails.

    The kernel, the lab started in it and all other processes under it are gone when this returns or raises,
    `KeyboardInterrupt` included.

    Parameters
    ----------
    notebook
        Gets the outputs.
    path
        Its file: names it in the progress and gives the folder.
    timeout
        Seconds a cell may take; None: no limit.
    environment
        Variables for the kernel besides those of this process.
    progress
        Called before and after each code cell.
    """
    started: list[psutil.Process] = []
    try:
        return _run(_execute(notebook, path, timeout, environment or {}, progress, started))
    finally:
        _end(started)


def _run(work: Coroutine[Any, Any, Execution]) -> Execution:
    """Run to the end, also where this thread has an event loop already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    begun: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def noted() -> Execution:
        task = asyncio.current_task()
        assert task is not None
        begun.append((asyncio.get_running_loop(), task))
        return await work

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(asyncio.run, noted())
        try:
            return future.result()
        except KeyboardInterrupt:
            for loop, task in begun:
                loop.call_soon_threadsafe(task.cancel)
            raise  # once the pool's end has waited for the kernel to be gone


async def _execute(
    notebook: NotebookNode,
    path: Path,
    timeout: float | None,
    environment: Mapping[str, str],
    progress: Callable[[CellProgress], object],
    started: list[psutil.Process],
) -> Execution:
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        # The kernel's remarks about itself are no part of the run.
        extra_arguments=["--IPKernelApp.log_level=50"],
    )
    client.km = client.create_kernel_manager()
    # Figures as data alone: otherwise each notebook would also hold all of plotly.js.
    variables = {**os.environ, "PLOTLY_RENDERER": "plotly_mimetype", **environment}
    await client.async_start_new_kernel(cwd=str(path.parent), env=variables)
    kernel = psutil.Process(client.km.provisioner.pid)
    started.append(kernel)
    execution = Execution()

    def note_children(told: CellProgress | None = None) -> None:
        """Noted while the kernel lives: afterwards nothing tells whose children they were."""
        started.extend(child for child in _children(kernel) if child not in started)
        if told is not None:
            progress(told)

    try:
        await client.async_start_new_kernel_client()
        execution.error = await _run_cells(client, path, note_children)
        execution.facts = await _facts(client)
    finally:
        note_children()
        if client.kc is not None:
            with contextlib.suppress(_RefusalError):  # then its processes are ended one by one, below
                await _ask(client, _STOP, STOP_S)
        if client.km is not None:
            await client._async_cleanup_kernel()
    return execution


async def _run_cells(client: NotebookClient, path: Path, progress: Callable[[CellProgress], object]) -> str | None:
    code = [
        (index, cell) for index, cell in enumerate(client.nb.cells) if cell.cell_type == "code" and cell.source.strip()
    ]
    for number, (index, cell) in enumerate(code, start=1):
        line = _first_line(cell.source)
        progress(CellProgress(path, number, len(code), line))
        begun = time.monotonic()
        try:
            await client.async_execute_cell(cell, index)
        except CellExecutionError as error:
            return f"Cell {number} ({line}): {error.ename}: {error.evalue}"
        except CellTimeoutError:
            problem = f"Cell {number} ({line}) took longer than the {client.timeout:g} s it was given."
            _note(cell, "CellTimeoutError", problem)
            await ensure_async(client.km.interrupt_kernel())
            return problem
        except DeadKernelError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # Ctrl-C, which nbclient takes for the kernel's death. The cell must end before the kernel
                # can stop its lab.
                await ensure_async(client.km.interrupt_kernel())
                raise asyncio.CancelledError from None
            problem = f"The kernel died in cell {number} ({line})."
            _note(cell, "DeadKernelError", problem)
            return problem
        progress(CellProgress(path, number, len(code), line, time.monotonic() - begun))
    return None


def _first_line(source: str) -> str:
    """Return a cell's first line, with the next where the first is only a magic such as %%px."""
    lines = [line.strip() for line in source.strip().splitlines() if line.strip()]
    return "  ".join(lines[:2]) if lines[0].startswith("%%") else lines[0]


def _note(cell: NotebookNode, name: str, text: str) -> None:
    trace = [f"\x1b[31m{name}\x1b[0m: {text}"]
    cell.outputs.append(nbformat.v4.new_output("error", ename=name, evalue=text, traceback=trace))


async def _facts(client: NotebookClient) -> dict[str, list[str]]:
    try:
        answer = await _ask(client, _FACTS, FACTS_S)
    except _RefusalError as refusal:
        return {"lab": [f"did not say what it used ({refusal})"]}
    if answer is None:
        return {}
    facts = json.loads(ast.literal_eval(answer))
    return {str(kind): [str(value) for value in values] for kind, values in facts.items()}


async def _ask(client: NotebookClient, expression: str, limit: float) -> str | None:
    """Return the kernel's answer to an expression, as text; None if it is dead or busy too long."""
    assert client.kc is not None
    if client.km is None or not await ensure_async(client.km.is_alive()):
        return None
    sent: Any = client.kc.execute("", silent=True, store_history=False, user_expressions={"answer": expression})
    message_id = await ensure_async(sent)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        try:
            reply = await ensure_async(client.kc.get_shell_msg(timeout=1))
        except queue.Empty:
            if not await ensure_async(client.km.is_alive()):
                return None
            continue
        if reply["parent_header"].get("msg_id") == message_id:
            answer = reply["content"].get("user_expressions", {}).get("answer", {})
            if answer.get("status") != "ok":
                raise _RefusalError(f"{answer.get('ename', 'no answer')}: {answer.get('evalue', '')}")
            return str(answer["data"]["text/plain"])
    return None


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _end(processes: list[psutil.Process]) -> None:
    """End what is left of the processes: ask, and kill those that do not listen."""
    known = {child.pid: child for process in processes for child in [process, *_children(process)]}
    _, alive = psutil.wait_procs(list(known.values()), timeout=1)
    for process in alive:
        _signal(process.terminate)
    _, alive = psutil.wait_procs(alive, timeout=2)
    for process in alive:
        _signal(process.kill)
    psutil.wait_procs(alive, timeout=2)


def _signal(send: Callable[[], None]) -> None:
    try:
        send()
    except psutil.NoSuchProcess:
        return  # it ended by itself in between
