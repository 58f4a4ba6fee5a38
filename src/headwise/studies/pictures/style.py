"""What the pictures share: colours that a page may replace, and maps of weights.

The colours are names more than colours: a page gives each its own shade in light and dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

INK = "#1d2126"  # text and whatever must be seen
SOFT = "#5d656e"  # axes, notes
LINE = "#e3e1db"  # grids and edges
CARD = "#ffffff"  # behind everything
SERIES = ("#1b716d", "#c2571a", "#5b4b9e", "#b0306a", "#8a7a00")  # in this order
GOOD, BAD = "#1b7a4b", "#b3261e"


def weight_map(
    axes: Axes, weights: Sequence[Sequence[float]], *, title: str = "", top: float = 1.0
) -> AxesImage:
    """Weights as viridis on a square-root scale, rows (queries) from top to bottom.

    ``top`` is the weight of the brightest colour.
    """
    from matplotlib.colors import PowerNorm

    # Without interpolation a cell stays a cell at any size.
    norm = PowerNorm(0.5, 0.0, top)
    image = axes.imshow(weights, cmap="viridis", norm=norm, aspect="equal", interpolation="none")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(title)
    for side in axes.spines.values():
        side.set_visible(False)
    return image
