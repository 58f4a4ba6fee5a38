"""The picture of an answer as SVG that takes its colours from the page around it."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

from headwise.studies import drawing as style
from headwise.studies.question import Answer
from headwise.support import extras

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEIGHT = 3.4  # inches, of 72 px; a picture may ask for another

# A page that defines these names has its own shades; elsewhere the colours stay what they are.
NAMES = {
    style.INK: "--ink",
    style.SOFT: "--soft",
    style.LINE: "--line",
    style.CARD: "--card",
    style.BAD: "--bad",
    **{colour: f"--series-{n}" for n, colour in enumerate(style.SERIES)},
}

STYLE = {
    "font.family": "sans-serif",
    "font.size": 10,
    "svg.fonttype": "none",  # text stays text
    "text.color": style.INK,
    "axes.facecolor": "none",
    "axes.edgecolor": style.LINE,
    "axes.labelcolor": style.SOFT,
    "axes.titlecolor": style.INK,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": style.SOFT,
    "ytick.color": style.SOFT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "grid.linewidth": 0.8,
    "lines.linewidth": 2,
    "legend.frameon": False,
}


def require() -> None:
    """Make sure that pictures can be drawn.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    extras.require("matplotlib", purpose="which draws the pictures of the page")


def svg(answer: Answer) -> str:
    """The picture as an ``svg`` element for a page, with its caption for those who do not see it.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    require()
    import matplotlib as mpl
    from cycler import cycler
    from matplotlib.figure import Figure

    # The salt keeps the ids of two pictures on one page apart, and the same from run to run.
    settings: dict[Any, Any] = STYLE | {
        "axes.prop_cycle": cycler(color=style.SERIES),
        "svg.hashsalt": answer.question.id,
    }
    with mpl.rc_context(settings):
        figure = Figure(figsize=(style.WIDTH, HEIGHT), layout="constrained")
        answer.question.draw(figure, answer.numbers)
        return _element(figure, answer.say(answer.question.caption))


def _element(figure: Figure, caption: str) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", facecolor="none", metadata={"Date": None})
    drawn = file.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    for colour, name in NAMES.items():
        drawn = re.sub(rf"{colour}\b", f"var({name}, {colour})", drawn)
    return drawn.replace("<svg ", f'<svg role="img" aria-label="{_escaped(caption)}" ', 1)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
