"""What the pictures share: colours that a page may replace, and maps of weights.

The colours are names more than colours: a page gives each its own shade in light and dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

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
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(False)
    return image
