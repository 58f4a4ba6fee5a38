"""Shared parts of the study's pictures: colours, weight maps, and drawing in inches.

A page replaces each colour by a shade of its light or dark theme.
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
else:  # matplotlib is optional: only annotations use these names
    Axes = Figure = SubFigure = AxesImage = Annotation = Any

Point = tuple[float | int, float | int]
WIDTH = 7.6  # inches, of every picture

INK = "#1d2126"  # text and marks
SOFT = "#5d656e"  # axes, notes
LINE = "#e3e1db"  # grids and edges
CARD = "#ffffff"  # behind everything
SERIES = ("#1b716d", "#c2571a", "#5b4b9e", "#b0306a", "#8a7a00")  # in this order
BAD = "#b3261e"


def draw_weight_map(axes: Axes, weights: Sequence[Sequence[float]]) -> AxesImage:
    """Draw weights from 0 to 1 in viridis on a square-root scale; rows are queries."""
    from matplotlib.colors import PowerNorm

    # Interpolation would blur the cells.
    norm = PowerNorm(0.5, 0.0, 1.0)
    image = axes.imshow(weights, cmap="viridis", norm=norm, aspect="equal", interpolation="none")
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    return image


def style_axes(axes: Axes, title: str = "", **settings: Any) -> None:
    """Set a title, light horizontal grid lines, and the ``settings`` of ``axes.set``."""
    axes.set(**settings)
    axes.set_title(title, loc="left")
    axes.grid(axis="y", color=LINE)


def label_point(axes: Axes, words: str, point: Point, offset: Point, **look: Any) -> Annotation:
    """Write words at an offset from a point, in points right and up."""
    return axes.annotate(words, point, offset, textcoords="offset points", **look)


def add_sheet(figure: Figure, *, height: float) -> Axes:
    """Return axes over the whole figure, in inches from the top left corner."""
    figure.set_layout_engine("none")  # all positions are fixed
    figure.set_figheight(height)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, WIDTH), ylim=(height, 0))
    axes.axis("off")
    return axes


def add_inset(
    figure: Figure, left: float, top: float, width: float, height: float, *, frame: bool = True
) -> Axes:
    """Return axes for an image, at a position of the sheet in inches."""
    whole = figure.get_figheight()
    axes = figure.add_axes(
        (left / WIDTH, 1 - (top + height) / whole, width / WIDTH, height / whole)
    )
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(visible=frame, color=SOFT, linewidth=0.5)
    return axes


def draw_block(
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
    """Draw a filled rectangle with a label in it."""
    from matplotlib.patches import Rectangle

    filled = Rectangle((left, top), width, height, facecolor=colour, edgecolor="none", alpha=alpha)
    axes.add_patch(filled)
    middle = (left + width / 2, top + height / 2 + 0.005)
    axes.text(*middle, label, color=CARD, fontsize=9, ha="center", va="center")


def draw_arrow(axes: Axes, x: float, top: float, bottom: float, label: str = "") -> None:
    """Draw a short arrow downwards, with a label to its right."""
    axes.annotate(
        "",
        (x, bottom),
        xytext=(x, top),
        arrowprops={"arrowstyle": "-|>", "color": SOFT, "lw": 0.9, "mutation_scale": 7},
    )
    axes.text(x + 0.1, (top + bottom) / 2, label, color=SOFT, fontsize=9, va="center")


def draw_separator(axes: Axes, y: float, left: float, right: float, *, colour: str = LINE) -> None:
    """Draw a thin horizontal line."""
    axes.plot([left, right], [y, y], color=colour, linewidth=0.8)


def write_heading(axes: Axes, x: float, y: float, words: str, *, align: str = "left") -> None:
    """Write a bold heading."""
    axes.text(x, y, words, color=INK, fontsize=9, ha=align, va="center", fontweight="bold")


def write_note(
    axes: Axes, x: float, y: float, words: str, *, align: str = "left", turn: float = 0.0
) -> None:
    """Write words in a softer shade, turned by ``turn`` degrees."""
    axes.text(x, y, words, color=SOFT, fontsize=9, ha=align, va="center", rotation=turn)


def signed_colours(
    values: Sequence[Sequence[float | int]], *, positive: str, negative: str, top: float
) -> list[list[tuple[float, ...]]]:
    """Return colours for an image: transparent at 0, opaque at ``top``, one colour for each sign.

    Opacity is the square root of the size, which keeps small numbers visible. Transparent rather
    than white suits a dark page too.
    """
    from matplotlib.colors import to_rgb

    up, down = to_rgb(positive), to_rgb(negative)
    return [
        [(*(up if value > 0 else down), min(1.0, abs(value) / top) ** 0.5) for value in row]
        for row in values
    ]
