"""The picture of the question `axis-order`."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from headwise.studies.pictures.style import SERIES, SOFT
from headwise.studies.question import Numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EXAMPLE = 8  # the token that the picture marks: one in the middle


def draw(figure: Figure, n: Numbers) -> None:
    """Which token depends on which, in the order that the layer was built for and in the other."""
    figure.set_figheight(4.2)
    titles = {
        "right": "batch_first=True matches this tensor:\neach token attends to its own sequence",
        "wrong": "the default misreads it: each token\nattends to its position in every sequence",
    }
    for axes, (order, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        draw_map(axes, n["maps"][order], n)
        axes.set_title(title, loc="left")


def draw_map(axes: Axes, rows: list[list[int]], n: Numbers) -> None:
    """A cell wherever an output token depends on an input token; one token's in another colour."""
    from matplotlib.patches import Rectangle

    tokens, length = len(rows), n["length"]
    for row, column in product(range(tokens), range(tokens)):
        if rows[row][column]:
            place = (column + 0.06, row + 0.06)
            colour = SERIES[1] if row == EXAMPLE else SERIES[0]
            axes.add_patch(Rectangle(place, 0.88, 0.88, facecolor=colour))
    axes.set(xlim=(0, tokens), ylim=(tokens, 0), aspect="equal")
    for edge in range(0, tokens + 1, length):
        axes.axhline(edge, color=SOFT, linewidth=0.8, clip_on=False)
        axes.axvline(edge, color=SOFT, linewidth=0.8, clip_on=False)
    for side in axes.spines.values():
        side.set_visible(False)
    centres = [length * (count + 0.5) for count in range(n["batch"])]
    names = [f"sequence {count}" for count in range(n["batch"])]
    axes.set_xticks(centres, names)
    axes.set_yticks(centres, names, rotation=90, va="center")
    axes.set_xlabel("input tokens")
    axes.set_ylabel("output tokens")
