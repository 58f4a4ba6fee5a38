"""Shared parts of the study's pictures: colours, weight maps, and drawing in inches.

A page replaces each colour by a shade of its light or dark theme.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headwise.reports.pictures import BAD as BAD
from headwise.reports.pictures import CARD as CARD
from headwise.reports.pictures import INK as INK
from headwise.reports.pictures import LINE as LINE
from headwise.reports.pictures import SERIES as SERIES
from headwise.reports.pictures import SOFT as SOFT
from headwise.reports.pictures import WIDTH as WIDTH
from headwise.study.question import Numbers, fill_template

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
    from matplotlib.figure import SubFigure as SubFigure
    from matplotlib.image import AxesImage
    from matplotlib.text import Annotation
else:  # matplotlib is optional: only annotations use these names
    Axes = Figure = SubFigure = AxesImage = Annotation = Any

Point = tuple[float | int, float | int]


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
    return axes.annotate(words, point, offset, textcoords="offset points", **look)


class Sheet:
    """Axes over a whole figure, in inches from the top left corner; words are templates over n."""

    def __init__(self, figure: Figure, n: Numbers, *, height: float) -> None:
        figure.set_layout_engine("none")
        figure.set_figheight(height)
        self.figure, self.n, self.height = figure, n, height
        self.axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        self.axes.set(xlim=(0, WIDTH), ylim=(height, 0))
        self.axes.axis("off")

    def inset(
        self, left: float, top: float, width: float, height: float, *, frame: bool = True
    ) -> Axes:
        whole = self.height
        axes = self.figure.add_axes(
            (left / WIDTH, 1 - (top + height) / whole, width / WIDTH, height / whole)
        )
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set(visible=frame, color=SOFT, linewidth=0.5)
        return axes

    def block(
        self,
        left: float,
        top: float,
        width: float,
        height: float,
        *,
        colour: str,
        alpha: float = 1.0,
        label: str = "",
    ) -> None:
        from matplotlib.patches import Rectangle

        look: dict[str, Any] = {"facecolor": colour, "edgecolor": "none", "alpha": alpha}
        self.axes.add_patch(Rectangle((left, top), width, height, **look))
        middle = left + width / 2, top + height / 2 + 0.005
        self.write(*middle, label, color=CARD, ha="center")

    def arrow(self, start: Point, end: Point, label: str = "") -> None:
        """Draw an arrow, with a label to the right of its middle."""
        look = {"arrowstyle": "-|>", "color": SOFT, "lw": 0.9, "mutation_scale": 7}
        self.axes.annotate("", end, xytext=start, arrowprops=look)
        if label:
            self.write((start[0] + end[0]) / 2 + 0.1, (start[1] + end[1]) / 2, label)

    def line(self, y: float) -> None:
        self.axes.plot([0.2, WIDTH - 0.2], [y, y], color=LINE, linewidth=0.8)

    def head(self, x: float, y: float, words: str, **look: Any) -> None:
        """Write a bold heading."""
        self.write(x, y, words, **{"color": INK, "fontweight": "bold"} | look)

    def write(self, x: float, y: float, words: str, **look: Any) -> None:
        """Write words, in a soft shade unless ``look`` has another colour."""
        look = {"color": SOFT, "fontsize": 9, "va": "center", **look}
        self.axes.text(x, y, fill_template(words, self.n), **look)


def signed_colours(
    values: Sequence[Sequence[float | int]], *, positive: str, negative: str, top: float
) -> list[list[tuple[float, ...]]]:
    """Return colours for an image: transparent at 0, opaque at ``top``, one colour for each sign.

    Opacity is the square root of the size, which keeps small numbers visible.
    """
    from matplotlib.colors import to_rgb

    up, down = to_rgb(positive), to_rgb(negative)
    return [
        [(*(up if value > 0 else down), min(1.0, abs(value) / top) ** 0.5) for value in row]
        for row in values
    ]


def per_cent(share: float, _position: int = 0) -> str:
    return f"{100 * share:.0f}\u00a0%"
