"""`%%px`: a cell that runs on the ranks; `%lab`: the lab's card."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.cluster.errors import ClusterError

if TYPE_CHECKING:
    from labkit.cluster.cells import Cell
    from labkit.cluster.lab import Lab
    from labkit.cluster.live_card import LiveCard

__all__ = ["parse_ranks", "register"]


def parse_ranks(text: str, size: int) -> list[int]:
    """Ranks from "0,2-3", ":2" or "all".

    Raises
    ------
    ClusterError
        When the text is not of that form.
    """
    if text == "all":
        return list(range(size))
    ranks: list[int] = []
    try:
        for part in text.split(","):
            if ":" in part:
                ranks += range(size)[slice(*(int(bound) if bound else None for bound in part.split(":")))]
            elif "-" in part.strip("-"):
                first, last = part.split("-")
                ranks += range(int(first), int(last) + 1)
            else:
                ranks.append(int(part))
    except ValueError:
        raise ClusterError(f"--ranks {text!r} names no ranks.", cure="for example --ranks 0,2 or --ranks 1-3") from None
    return list(dict.fromkeys(ranks))


def this_lab() -> Lab:
    """The notebook's lab, or an error that says how to get one."""
    from labkit.cluster.current import current

    lab = current()
    if lab is None:
        raise ClusterError("There is no lab yet.", cure="lab = labkit.start(ranks=4)")
    return lab


def register() -> None:
    """Make the magics known to IPython, if this process is one."""
    import sys

    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is None:
        return
    from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class
    from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

    @magics_class
    class LabMagics(Magics):
        """labkit's magics."""

        @magic_arguments()
        @argument(
            "--ranks", "--targets", "-r", "-t", default="all", help="which ranks: 0,2 or 1-3 or :2 (default: all)"
        )
        @argument("--noblock", "-a", action="store_true", help="do not wait; lab.wait() shows the output later")
        @argument("--quiet", "-q", action="store_true", help="do not show what the ranks print")
        @argument("--deadline", "-d", type=float, help="end the cell after so many seconds")
        @argument("--setup", action="store_true", help="a rank that is started again by lab.heal() runs this cell, too")
        @argument("code", nargs="*", help="the code, for a line magic")
        @line_cell_magic
        def px(self, line: str, cell: str | None = None) -> Cell | None:
            """Run code on the ranks: waits, shows the output in rank order while it comes."""
            lab = this_lab()
            if cell is None:
                lab.run(line)
                return None
            options = parse_argstring(self.px, line)
            ranks = parse_ranks(options.ranks, lab.size)
            running = lab.run(
                cell,
                ranks,
                block=not options.noblock,
                show=not options.quiet,
                deadline=options.deadline,
                setup=options.setup,
            )
            return running if options.noblock else None

        @line_magic
        def lab(self, line: str) -> Lab | LiveCard | None:
            """%lab shows the card, %lab watch one that follows the ranks; stop, restart, interrupt, heal, shrink."""
            lab, action = this_lab(), line.strip()
            if action in ("", "status"):
                return lab
            if action == "watch":
                return lab.watch()
            if action not in ("stop", "restart", "interrupt", "heal", "shrink"):
                raise ClusterError(
                    f"%lab {action} is nothing that %lab does.",
                    cure="%lab [status|watch|stop|restart|interrupt|heal|shrink]",
                )
            getattr(lab, action)()
            return None

    shell.register_magics(LabMagics)
