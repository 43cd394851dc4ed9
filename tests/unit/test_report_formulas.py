"""Formulas in markdown become MathML; what is no formula stays."""

import nbformat
import pytest
from nbformat.v4 import new_markdown_cell, new_notebook

from labkit.report.export import export
from labkit.report.formulas import latex_output, mathml


def page(tmp_path: object, source: str) -> str:
    notebook: nbformat.NotebookNode = new_notebook(cells=[new_markdown_cell(source)])
    html = export(notebook, name="words", folder=tmp_path)  # type: ignore[arg-type]
    return html.partition("<main>")[2]


@pytest.mark.parametrize(
    ("source", "display"),
    [
        (r"so $\alpha^2$ it is", "inline"),
        ("$$\n\\frac{N}{B \\cdot R}\n$$", "block"),
        (r"\\[ x_1 + x_2 \\]", "block"),
        (r"\\( x_1 \\)", "inline"),
        ("\\begin{align}\na &= b \\\\\nc &= d\n\\end{align}", "block"),
        (r"| a |" + "\n|---|\n" + r"| $x$ |", "inline"),
    ],
)
def test_formulas_become_mathml(tmp_path: object, source: str, display: str) -> None:
    html = page(tmp_path, source)
    assert html.count("<math") == 1
    assert f'display="{display}"' in html
    assert "$" not in html.replace("</script>", "")


@pytest.mark.parametrize(
    "source", ["`$x$`", "```\n$x$ and $$y$$\n```", "    $x$ indented", r"costs \$5 and \$6", "just 5 $ there"]
)
def test_code_and_money_stay_as_they_are(tmp_path: object, source: str) -> None:
    html = page(tmp_path, source)
    assert "<math" not in html
    assert "$" in html


def test_a_formula_that_cannot_be_drawn_is_shown_as_text(tmp_path: object) -> None:
    html = page(tmp_path, r"before $x_1_2$ after")
    assert "<math" not in html
    assert "$x_1_2$" in html
    assert "after" in html
    assert mathml("<b>x_1_2", display=True).endswith("$$&lt;b&gt;x_1_2$$</code>")


def test_less_than_signs_in_a_formula_do_not_become_tags(tmp_path: object) -> None:
    html = page(tmp_path, r"$T_{sync} < (R-1)\,T_{comp} & <b>$")
    assert "<b>" not in html


@pytest.mark.parametrize("latex", ["$x$", "$$x$$", r"\[x\]", r"\(x\)", r"\begin{equation}x\end{equation}", "x"])
def test_latex_outputs_are_drawn_with_any_delimiters(latex: str) -> None:
    html = latex_output(latex)
    assert html.count("<mi>x</mi>") == 1
    assert "$" not in html
