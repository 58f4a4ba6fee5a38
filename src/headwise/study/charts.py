"""What the pictures share: colours that a page may replace, maps of weights, and a sheet in inches.

The colours are names more than colours: a page gives each its own shade in light and dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
    from matplotlib.figure import SubFigure as SubFigure
    from matplotlib.image import AxesImage
    from matplotlib.text import Annotation
else:  # matplotlib need not be there: only annotations name these
    Axes = Figure = SubFigure = AxesImage = Annotation = Any

Place = tuple[float | int, float | int]
WIDTH = 7.6  # inches, of every picture

INK = "#1d2126"  # text and whatever must be seen
SOFT = "#5d656e"  # axes, notes
LINE = "#e3e1db"  # grids and edges
CARD = "#ffffff"  # behind everything
SERIES = ("#1b716d", "#c2571a", "#5b4b9e", "#b0306a", "#8a7a00")  # in this order
BAD = "#b3261e"


def weight_map(axes: Axes, weights: Sequence[Sequence[float]]) -> AxesImage:
    """Weights from 0 to 1 as viridis on a square-root scale, rows (queries) from top to bottom."""
    from matplotlib.colors import PowerNorm

    # Without interpolation a cell stays a cell at any size.
    norm = PowerNorm(0.5, 0.0, 1.0)
    image = axes.imshow(weights, cmap="viridis", norm=norm, aspect="equal", interpolation="none")
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    return image


def plotted(axes: Axes, title: str = "", **settings: Any) -> None:
    """A title, light lines across, and whatever else ``axes.set`` sets."""
    axes.set(**settings)
    axes.set_title(title, loc="left")
    axes.grid(axis="y", color=LINE)


def beside(axes: Axes, words: str, place: Place, offset: Place, **look: Any) -> Annotation:
    """Words so many points right of and above a place."""
    return axes.annotate(words, place, offset, textcoords="offset points", **look)


def sheet(figure: Figure, *, height: float) -> Axes:
    """Axes over the whole figure: x and y are inches, from the top left corner."""
    figure.set_layout_engine("none")  # everything has its place
    figure.set_figheight(height)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, WIDTH), ylim=(height, 0))
    axes.axis("off")
    return axes


def inset(
    figure: Figure, left: float, top: float, width: float, height: float, *, frame: bool = True
) -> Axes:
    """Axes at a place of the sheet, in its inches, for an image."""
    whole = figure.get_figheight()
    axes = figure.add_axes(
        (left / WIDTH, 1 - (top + height) / whole, width / WIDTH, height / whole)
    )
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(visible=frame, color=SOFT, linewidth=0.5)
    return axes


def block(
    axes: Axes,
    left: float,
    top: float,
    width: float,
    height: float,
    *,
    colour: str,
    alpha: float = 1.0,
    label: str = "",
) -> None:
    """A filled rectangle with a name in it."""
    from matplotlib.patches import Rectangle

    filled = Rectangle((left, top), width, height, facecolor=colour, edgecolor="none", alpha=alpha)
    axes.add_patch(filled)
    middle = (left + width / 2, top + height / 2 + 0.005)
    axes.text(*middle, label, color=CARD, fontsize=9, ha="center", va="center")


def arrow(axes: Axes, x: float, top: float, bottom: float, label: str = "") -> None:
    """A short arrow downwards, with what happens there beside it."""
    axes.annotate(
        "",
        (x, bottom),
        xytext=(x, top),
        arrowprops={"arrowstyle": "-|>", "color": SOFT, "lw": 0.9, "mutation_scale": 7},
    )
    axes.text(x + 0.1, (top + bottom) / 2, label, color=SOFT, fontsize=9, va="center")


def rule(axes: Axes, y: float, left: float, right: float, *, colour: str = LINE) -> None:
    """A thin line across."""
    axes.plot([left, right], [y, y], color=colour, linewidth=0.8)


def heading(axes: Axes, x: float, y: float, words: str, *, align: str = "left") -> None:
    """Words that name what stands below or beside them."""
    axes.text(x, y, words, color=INK, fontsize=9, ha=align, va="center", fontweight="bold")


def note(
    axes: Axes, x: float, y: float, words: str, *, align: str = "left", turn: float = 0.0
) -> None:
    """Words in a softer shade, turned by some degrees."""
    axes.text(x, y, words, color=SOFT, fontsize=9, ha=align, va="center", rotation=turn)


def tinted(
    values: Sequence[Sequence[float | int]], *, positive: str, negative: str, top: float
) -> list[list[tuple[float, ...]]]:
    """Colours for an image: clear at 0, full at ``top``, one colour for each sign.

    They go by the root of the size, so that small numbers are seen; and clear rather than white,
    so that the picture also stands on a dark page.
    """
    from matplotlib.colors import to_rgb

    up, down = to_rgb(positive), to_rgb(negative)
    return [
        [(*(up if value > 0 else down), min(1.0, abs(value) / top) ** 0.5) for value in row]
        for row in values
    ]
