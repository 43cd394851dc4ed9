"""The `labkit` command."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from labkit.cluster.errors import ClusterError

app = typer.Typer(
    help="A lab for distributed PyTorch over real MPI.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Ranks = Annotated[int, typer.Option("--ranks", "-n", help="World size.")]
Profile = Annotated[str, typer.Option(help="ipyparallel profile: local is this machine.")]


def say(text: str) -> None:
    """Progress goes to stderr, so that stdout holds results alone."""
    print(text, file=sys.stderr, flush=True)


@app.command()
def up(ranks: Ranks = 4, profile: Profile = "local") -> None:
    """Start a lab that stays up; join it from notebooks with labkit.connect()."""
    import labkit

    begin = time.monotonic()
    lab = labkit.start(ranks, profile, detached=True, progress=lambda stage: say(f"{stage} …"))
    print(lab)
    print(f"\nup in {time.monotonic() - begin:.1f} s as {lab.session.cluster_id}")
    print("join it:  labkit.connect()      end it:  labkit down")


@app.command()
def status(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show every lab of yours on this machine, rank by rank: what each computes, or whom it waits for."""
    from rich.console import Console
    from rich.table import Table

    from labkit.cluster.status import machine_status

    labs = machine_status()
    if as_json:
        print(json.dumps(labs, indent=1))
        return
    if not labs:
        print("no lab is running   (start one: labkit up, or labkit.start() in a notebook)")
    for lab in labs:
        kept = "stays up" if lab["detached"] else f"ends with process {lab['owner']}"
        table = Table(title=f"{lab['id']} · {lab['mpi']} · {lab['state']} · {kept}", title_justify="left")
        for column in ("process", "pid", "memory", "cpu", "state", "doing"):
            table.add_column(column, justify="right" if column in ("pid", "memory", "cpu") else "left")
        for row in lab["processes"]:
            used = f"{row['memory'] / 1e6:,.0f} MB", f"{row['cpu']:.0f} %"
            table.add_row(row["role"], str(row["pid"]), *used, row["state"], row["doing"])
        Console().print(table)


@app.command()
def down(
    lab: Annotated[
        str | None, typer.Argument(help="Which lab (see: labkit status); default: every lab that stays up.")
    ] = None,
) -> None:
    """End labs: those started by `labkit up`, or the one that is named."""
    from labkit.cluster.sessions import sessions

    chosen = [session for session in sessions() if session.cluster_id == lab or (lab is None and session.detached)]
    if not chosen:
        others = ", ".join(session.cluster_id for session in sessions())
        raise ClusterError(
            f"There is no lab {lab!r}." if lab else "No lab that stays up.",
            cure=f"name one of: {others}" if others else "",
        )
    for session in chosen:
        session.remove()
        print(f"ended {session.cluster_id}")


@app.command()
def clean() -> None:
    """Remove what crashed labs left behind: processes, shared memory, files.  Touches nothing else."""
    from labkit.cluster.sessions import clean_stale

    removed = clean_stale()
    print("\n".join(f"removed {line}" for line in removed) or "nothing to clean")


@app.command()
def doctor(
    ranks: Ranks = 4,
    profile: Profile = "local",
    faults: Annotated[
        bool, typer.Option("--faults", help="Also make faults in a lab and see that every cell comes back (minutes).")
    ] = False,
) -> None:
    """Check what a start needs, and name the cure for what is wrong."""
    from rich.console import Console

    from labkit.cluster import preflight
    from labkit.cluster.profiles import profile_folder

    console = Console(highlight=False, soft_wrap=True)
    bad = 0
    for check in preflight.thorough(ranks, profile_folder(profile)):
        bad += not check.ok
        mark = "[green]ok  [/]" if check.ok else "[bold red]bad [/]"
        console.print(f"{mark} {check.name:18}", end="")
        console.print(check.found, markup=False)
        if not check.ok:
            console.print(f"     cure: {check.cure}", markup=False)
    console.print(f"\n{bad} to mend" if bad else "\nready: labkit.start() will work here")
    if faults and not bad:
        bad += not try_faults(max(ranks, 2), profile)
    raise typer.Exit(1 if bad else 0)


def try_faults(ranks: int, profile: str) -> bool:
    """Make every fault in a lab, print how long each took to the prompt; whether everything came back."""
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    import labkit
    from labkit.cluster import faults

    outcomes = []
    with labkit.start(ranks, profile) as lab:
        faults.prepare(lab)
        for case in track(list(faults.cases()), "faults", console=Console(stderr=True), transient=True):
            with contextlib.redirect_stdout(io.StringIO()):  # that a rank was started again is in the table
                outcomes.append(faults.try_out(lab, case))
            if outcomes[-1].wrong:
                lab.restart()
                faults.prepare(lab)
    shown = Table(
        title=f"every fault with {', '.join(faults.BYTES)} messages, p2p and collective", title_justify="left"
    )
    for column in ("fault", "in", "as it must be", "median to the prompt", "worst", "started again in"):
        shown.add_column(column, justify="left" if column in ("fault", "in") else "right")
    for row in faults.table(outcomes):
        shown.add_row(*row)
    Console().print(shown)
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    for outcome in wrong:
        print(f"\n{outcome.case}:")
        print("\n".join(f"  {line}" for text in outcome.wrong for line in text.splitlines()))
    return not wrong


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def train(context: typer.Context) -> None:
    """Train by synchronous SGD from the command line (labkit train --help has the options)."""
    from labkit.train.program import main as program

    raise typer.Exit(program(context.args, relaunch=launch_training))


def launch_training(world_size: int, arguments: list[str]) -> int:
    """Run the training program on `world_size` ranks; gives its exit status."""
    from labkit.cluster import preflight
    from labkit.cluster.implementations import mpiexec_command
    from labkit.cluster.processes import tied_to_parent
    from labkit.cluster.profiles import profile_folder

    preflight.require(world_size, profile_folder("local"))
    command, environment = mpiexec_command(world_size)
    if sys.stderr.isatty():  # mpiexec stands between the ranks and the terminal, so they cannot see it
        environment["LABKIT_PROGRESS"] = "rewrite"
    program = [*tied_to_parent(), *command, sys.executable, "-m", "labkit.train", *arguments]
    world = subprocess.Popen(program, env=environment)
    try:
        return world.wait()
    except KeyboardInterrupt:
        # mpiexec got the same Ctrl-C and ends its ranks; a second one here would leave it half done.
        return world.wait(timeout=20) or 130


@app.command()
def report(
    notebooks: Annotated[list[Path], typer.Argument(help="Notebooks to run, in this order.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the HTML files.")] = Path("reports"),
    timeout: Annotated[float | None, typer.Option(help="Seconds that one cell may take (default: no limit).")] = None,
) -> None:
    """Run notebooks on clusters of their own and write each as one HTML file that opens offline."""
    from labkit.report import CellProgress, run

    terminal = sys.stderr.isatty()

    def show(progress: CellProgress) -> None:
        """A line a cell: when it is done, and on a terminal also while it runs."""
        if terminal:
            print(f"\r\033[K{progress}", end="" if progress.seconds is None else "\n", file=sys.stderr, flush=True)
        elif progress.seconds is not None:
            say(str(progress))

    results = run(notebooks, out, timeout=timeout, progress=show)
    for result in results:
        print(result.path)
    failed = [result for result in results if not result.ok]
    for result in failed:
        say(f"\n{result.path}: stopped at an error, the report goes up to there:\n{result.error}")
    raise typer.Exit(1 if failed else 0)


@app.command()
def bench(
    name: Annotated[str | None, typer.Argument(help="Which benchmark; none: all of them.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    as_chart: Annotated[
        bool, typer.Option("--chart", help="Print a Mermaid chart for a README, too: allreduce, step.")
    ] = False,
    quick: Annotated[bool, typer.Option(help="Fewer repetitions: shows that it runs, not what it costs.")] = False,
    ranks: Annotated[
        int | None, typer.Option(min=2, help="How many ranks to measure on, for: allreduce, epoch, step.")
    ] = None,
) -> None:
    """Measure what the README's tables show."""
    from labkit import bench as benchmarks
    from labkit.bench.chart import CHARTS, mermaid
    from labkit.bench.table import show

    if name is not None and name not in benchmarks.NAMES:
        known = "\n  ".join(f"{known:12}{what}" for known, what in benchmarks.NAMES.items())
        raise ClusterError(f"There is no benchmark {name!r}.", cure=f"one of\n  {known}")
    if ranks is not None and name not in benchmarks.RANKED:
        known = ", ".join(benchmarks.RANKED)
        raise ClusterError("--ranks goes with one benchmark.", cure=f"name one of: {known}")
    met = True
    for chosen in [name] if name else benchmarks.NAMES:
        say(f"{chosen}: {benchmarks.NAMES[chosen]} …")
        outcome = benchmarks.run(chosen, quick=quick, ranks=None if ranks is None else (ranks,))
        met &= all(goal.met for goal in outcome.goals)
        if as_json:
            print(json.dumps(outcome.as_json()))
        else:
            show(outcome)
            if as_chart and chosen in CHARTS:
                print(mermaid(outcome))
    raise typer.Exit(0 if met else 1)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def notebook(context: typer.Context) -> None:
    """Open JupyterLab on loopback, its cluster tab listing labkit's profiles; arguments go to JupyterLab."""
    from labkit.cluster.profiles import profile_folder

    environment: dict[str, Any] = os.environ | {"IPYTHONDIR": str(profile_folder("local").parent)}
    command = [sys.executable, "-m", "jupyterlab", "--ip=127.0.0.1", *context.args]
    if os.geteuid() == 0:
        command.append("--allow-root")
    raise typer.Exit(subprocess.call(command, env=environment))


def main() -> None:
    """Run the command; an error of ours is one line and its cure, not a traceback."""
    try:
        app()
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(130)
    except Exception as error:
        if not isinstance(error, ClusterError) and not getattr(error, "expected", False):
            raise
        say(f"labkit: {error}")
        sys.exit(2)


if __name__ == "__main__":
    main()
