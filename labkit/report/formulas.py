"""Formulas as MathML, which browsers draw by themselves: no script, no font from elsewhere."""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert
from nbconvert.filters.markdown_mistune import IPythonRenderer

__all__ = ["MathRenderer", "latex_output", "mathml"]

_DELIMITERS = (("$$", "$$", True), ("\\[", "\\]", True), ("\\(", "\\)", False), ("$", "$", False))
# MathML has no numbering: the environments that number take the form of those that do not.
_WHOLE = {"equation": None, "displaymath": None, "math": None, "align": "aligned", "gather": "gathered"}


def mathml(latex: str, *, display: bool) -> str:
    """Turn a formula without its dollars into a ``<math>`` element; as text where that cannot be done.

    Parameters
    ----------
    latex
        What stands between the dollars.
    display
        Whether it stands on a line of its own.
    """
    try:
        return str(convert(latex.strip(), display="block" if display else "inline"))
    except Exception as error:  # latex2mathml raises many kinds; a formula is never lost for it
        reason = html.escape(f"not drawn: {type(error).__name__} {error}", quote=True)
        mark = "$$" if display else "$"
        return f'<code class="formula" title="{reason}">{html.escape(mark + latex + mark)}</code>'


def latex_output(latex: str) -> str:
    """Turn an output of type text/latex, dollars and all, into HTML."""
    text = latex.strip()
    for begin, end, display in _DELIMITERS:
        if text.startswith(begin) and text.endswith(end) and len(text) >= len(begin) + len(end):
            return mathml(text[len(begin) : -len(end)], display=display)
    found = re.fullmatch(r"\\begin\{(\w+)\*?\}(.*)\\end\{\1\*?\}", text, re.DOTALL)
    return environment(found[1], found[2]) if found else mathml(text, display=True)


def environment(name: str, body: str) -> str:
    """Turn a LaTeX environment into HTML."""
    inner = _WHOLE.get(name.rstrip("*"), name)
    return mathml(body if inner is None else f"\\begin{{{inner}}}{body}\\end{{{inner}}}", display=True)


class MathRenderer(IPythonRenderer):
    """nbconvert's markdown, with its formulas drawn; what stands in code stays as it is."""

    def inline_math(self, body: str) -> str:
        """Draw ``$…$``."""
        return mathml(body, display=False)

    def block_math(self, body: str) -> str:
        """Draw ``$$…$$``."""
        return mathml(body, display=True)

    def latex_environment(self, name: str, body: str) -> str:
        r"""Draw ``\begin{…}…\end{…}``."""
        return environment(name, body)
