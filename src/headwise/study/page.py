"""HTML page of the study: questions, verdicts, pictures, facts.

The pictures are SVG and take their colours from the page.
"""

from __future__ import annotations

import io
import re
from typing import Any

from markupsafe import Markup, escape

from headwise.reports.templates import secure_page, template_environment
from headwise.study import drawing
from headwise.study.question import Answer
from headwise.study.run import Study
from headwise.support.lazy import require_package

HEIGHT = 3.4  # inches, of 72 px; a picture may ask for another

# CSS variables by colour. Outside of a page that defines them, a picture keeps its own colours.
CSS_VARIABLES = {
    drawing.INK: "--ink",
    drawing.SOFT: "--soft",
    drawing.LINE: "--line",
    drawing.CARD: "--card",
    drawing.BAD: "--bad",
    **{colour: f"--series-{n}" for n, colour in enumerate(drawing.SERIES)},
}

STYLE = {
    "font.family": "sans-serif",
    "font.size": 10,
    "svg.fonttype": "none",  # text stays text
    "text.color": drawing.INK,
    "axes.facecolor": "none",
    "axes.edgecolor": drawing.LINE,
    "axes.labelcolor": drawing.SOFT,
    "axes.titlecolor": drawing.INK,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    **{f"{axis}tick.color": drawing.SOFT for axis in "xy"},
    **{f"{axis}tick.{kind}.size": 0 for axis in "xy" for kind in ("major", "minor")},
    "grid.linewidth": 0.8,
    "lines.linewidth": 2,
    "legend.frameon": False,
}


def render_study_page(result: Study) -> str:
    """Return the page as HTML."""
    # matplotlib escapes the text in the pictures.
    pictures = {answer.question.id: Markup(answer_svg(answer)) for answer in result.answers}
    template = template_environment().get_template("study.html")
    page = template.render(study=result, pictures=pictures, version=result.setting["headwise"])
    return secure_page(page)


def require_matplotlib() -> None:
    """Raise MissingExtraError where matplotlib, which draws the pictures, is not installed."""
    require_package("matplotlib", purpose="which draws the pictures of the page")


def answer_svg(answer: Answer) -> str:
    """Return the picture as an ``svg`` element; its caption is the label for screen readers."""
    require_matplotlib()
    import matplotlib as mpl
    from cycler import cycler
    from matplotlib.figure import Figure

    # The salt makes ids unique on a page and equal in every run.
    settings: dict[Any, Any] = STYLE | {
        "axes.prop_cycle": cycler(color=drawing.SERIES),
        "svg.hashsalt": answer.question.id,
    }
    file = io.StringIO()
    with mpl.rc_context(settings):
        figure = Figure(figsize=(drawing.WIDTH, HEIGHT), layout="constrained")
        answer.question.draw(figure, answer.numbers)
        figure.savefig(file, format="svg", facecolor="none", metadata={"Date": None})
    drawn = file.getvalue()
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn[drawn.index("<svg") :], flags=re.DOTALL)
    for colour, name in CSS_VARIABLES.items():
        drawn = re.sub(rf"{colour}\b", f"var({name}, {colour})", drawn)
    caption = escape(answer.fill(answer.question.caption))
    return drawn.replace("<svg ", f'<svg role="img" aria-label="{caption}" ', 1)
