"""Pictures of a page: SVG by matplotlib, whose colours are those of the page's theme."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from headwise.support.lazy import require_package

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 7.6  # inches, of every picture

INK = "#1d2126"  # text and marks
SOFT = "#5d656e"  # axes, notes
LINE = "#e3e1db"  # grids and edges
CARD = "#ffffff"  # behind everything
SERIES = ("#1b716d", "#c2571a", "#5b4b9e", "#b0306a", "#8a7a00")  # in this order
BAD = "#b3261e"

# CSS variables by colour. Outside of a page that defines them, a picture keeps its own colours.
CSS_VARIABLES = {
    INK: "--ink",
    SOFT: "--soft",
    LINE: "--line",
    CARD: "--card",
    BAD: "--bad",
    **{colour: f"--series-{n}" for n, colour in enumerate(SERIES)},
}

STYLE = {
    "font.family": "sans-serif",
    "font.size": 10,
    "svg.fonttype": "none",  # text stays text
    "text.color": INK,
    "axes.facecolor": "none",
    "axes.edgecolor": LINE,
    "axes.labelcolor": SOFT,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    **{f"{axis}tick.color": SOFT for axis in "xy"},
    **{f"{axis}tick.{kind}.size": 0 for axis in "xy" for kind in ("major", "minor")},
    "grid.linewidth": 0.8,
    "lines.linewidth": 2,
    "legend.frameon": False,
}


def require_matplotlib() -> None:
    """Raise MissingExtraError where matplotlib, which draws the pictures, is not installed."""
    require_package("matplotlib", purpose="which draws the pictures of the page")


def draw_svg(draw: Callable[[Figure], None], caption: str, *, name: str, height: float) -> Markup:
    """Return a picture as an ``svg`` element; its caption is the label for screen readers.

    Args:
        draw: draws into an empty figure of ``height`` inches.
        caption: the picture in words.
        name: unique on its page.
        height: in inches, of 72 px.
    """
    require_matplotlib()
    import matplotlib as mpl
    from cycler import cycler
    from matplotlib.figure import Figure

    # The salt makes ids unique on a page and equal in every run.
    settings: dict[Any, Any] = STYLE | {
        "axes.prop_cycle": cycler(color=SERIES),
        "svg.hashsalt": name,
    }
    file = io.StringIO()
    with mpl.rc_context(settings):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure)
        figure.savefig(file, format="svg", facecolor="none", metadata={"Date": None})
    drawn = file.getvalue()
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn[drawn.index("<svg") :], flags=re.DOTALL)
    for colour, variable in CSS_VARIABLES.items():
        drawn = re.sub(rf"{colour}\b", f"var({variable}, {colour})", drawn)
    label = f'<svg role="img" aria-label="{escape(caption)}" '
    return Markup(drawn.replace("<svg ", label, 1))  # matplotlib escapes the text in it
