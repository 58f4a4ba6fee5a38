"""The picture of the question `implementations`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headwise.studies.pictures.style import CARD, INK, SOFT
from headwise.studies.question import Numbers
from headwise.studies.words import scientific

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colorbar import Colorbar
    from matplotlib.figure import Figure


def draw(figure: Figure, n: Numbers) -> None:
    """Who differs how much from whom, on a log scale; below, the same weights misread."""
    from matplotlib.colors import LogNorm

    figure.set_figheight(6.3)
    figure.set_layout_engine("none")  # the names stand in a column of their own
    norm = LogNorm(1e-8, 10)
    names, misread = list(n["names"].values()), list(n["misread"].values())
    place = {"left": 0.335, "right": 0.885, "top": 0.955, "bottom": 0.09, "hspace": 0.36}
    grid = figure.add_gridspec(3, 1, height_ratios=(len(names), len(misread), 0.4), **place)
    upper, lower, scale = (figure.add_subplot(grid[row]) for row in range(3))
    differences(upper, n["pairs"], names, norm)
    upper.set_title("Filled with the same weights", loc="left")
    for row in range(len(names)):
        upper.text(-5.45, row + 0.5, str(row + 1), color=SOFT, ha="right", va="center")
    differences(lower, n["misread_pairs"], misread, norm)
    lower.set_title("PyTorch's layer with these weights misread, against each", loc="left")
    bar = figure.colorbar(lower.collections[0], cax=scale, orientation="horizontal")
    draw_scale(bar, n["allowed"])


def draw_scale(bar: Colorbar, allowed: float) -> None:
    """What the colours mean, and how far rounding may go."""
    bar.set_ticks([1e-8, 1e-6, 1e-4, 1e-2, 1.0], labels=["10⁻⁸", "10⁻⁶", "10⁻⁴", "10⁻²", "1"])
    bar.ax.minorticks_off()
    bar.outline.set_visible(False)
    bar.ax.axvline(allowed, color=CARD, linewidth=3)
    words = f"rounding allows up to {scientific(allowed)}"
    bar.ax.text(
        allowed, 1.25, words, color=INK, va="bottom", transform=bar.ax.get_xaxis_transform()
    )
    bar.set_label("largest difference between two outputs, on a logarithmic scale")


def size(value: float) -> str:
    """A difference in few signs: with a power of ten only where it is small."""
    return f"{value:.1f}" if value >= 0.1 else scientific(value)


def differences(
    axes: Axes, values: Sequence[Sequence[float]], names: Sequence[str], norm: Any
) -> None:
    """Coloured differences, with the largest of each row beside it; = where all bits agree."""
    import numpy as np

    shown = np.ma.masked_equal(np.array(values), 0.0)
    axes.pcolormesh(shown, cmap="viridis", norm=norm, edgecolors=CARD, linewidth=2)
    axes.invert_yaxis()
    columns = len(values[0])
    axes.set_xticks([c + 0.5 for c in range(columns)], [str(c + 1) for c in range(columns)])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(False)
    for row, (name, numbers) in enumerate(zip(names, values, strict=True)):
        axes.text(-5.2, row + 0.5, name, color=INK, va="center")
        axes.text(columns + 0.2, row + 0.5, size(max(numbers)), color=SOFT, va="center")
        for column, value in enumerate(numbers):
            if value == 0:
                axes.text(column + 0.5, row + 0.5, "=", color=SOFT, ha="center", va="center")
    axes.text(columns + 0.2, -0.1, "at most", color=SOFT, va="bottom")
