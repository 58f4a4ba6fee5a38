"""The picture of the question `same-function`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headwise.studies.pictures.style import INK, LINE, SERIES, SOFT, weight_map
from headwise.studies.question import Numbers
from headwise.studies.words import say

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure


def draw(figure: Figure, n: Numbers) -> None:
    """The maps of one head and of eight, and how much a trained encoder's heads change."""
    figure.set_figheight(5.5)
    parts: Any = figure.subfigures(2, 1, height_ratios=(3.1, 2.4))
    draw_maps(parts[0], n)
    draw_encoder(parts[1], n)


def draw_maps(figure: SubFigure, n: Numbers) -> None:
    """A row of maps for each way to draw tokens and matrices, and how often the outputs agree."""
    rows = {
        "published": "torch.rand",
        "normal": "torch.randn",
        "own": "default\ninitialisation",
    }
    drawn = n["maps"] | {"published": n["equal_maps"]}
    ratios = [1, 0.2, *[1] * n["heads"]]
    grid = figure.subplots(len(rows), len(ratios), width_ratios=ratios)
    for row, (name, title) in zip(grid, rows.items(), strict=True):
        row[1].set_axis_off()
        for axes, weights in zip([row[0], *row[2:]], drawn[name], strict=True):
            image = weight_map(axes, weights)
        row[0].set_ylabel(title, rotation=0, ha="right", va="center", color=INK)
        said = n["said"][name]
        words = "equal in\n{equal} of {seeds} seeds;\non average\n{apart:percent} apart"
        row[-1].annotate(
            say(words, said | n["cases"][name]),
            *((1, 0.5), (8, 0)),
            xycoords="axes fraction",
            textcoords="offset points",
            va="center",
            color=INK if said["equal"] else SOFT,
        )
    grid[0][0].set_title("one head")
    several = grid[0][2].annotate(
        f"{n['heads']} heads with the same queries, keys and values",
        *((0, 1), (0, 6)),
        xycoords="axes fraction",
        textcoords="offset points",
    )
    several.set_in_layout(False)  # wider than its column, which shall not grow with it
    bar = figure.colorbar(image, ax=grid, location="bottom", aspect=60, shrink=0.7, pad=0.04)
    bar.set_ticks(ticks := [0, 0.01, 0.1, 0.3, 1], labels=[f"{100 * x:g}\u00a0%" for x in ticks])
    bar.set_label("attention weight (square-root scale)")
    bar.outline.set_visible(False)


def draw_encoder(figure: SubFigure, n: Numbers) -> None:
    """How far each head of each layer is from its part of the merged head."""
    axes, encoder = figure.subplots(), n["encoder"]
    for layer, heads in enumerate(encoder["apart"]):
        spread = [layer + (place / max(len(heads) - 1, 1) - 0.5) / 2 for place in range(len(heads))]
        axes.plot(spread, heads, "o", markersize=4, color=SERIES[0])
    axes.set_xticks(range(encoder["layers"]), [f"layer {x}" for x in range(encoder["layers"])])
    axes.set_ylim(0)
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f}\u00a0%")
    axes.set_title(
        f"{encoder['model']}, the same projections read as one head in place of {encoder['heads']}",
        loc="left",
    )
    axes.set_ylabel("relative difference of\neach head's output")
    axes.grid(axis="y", color=LINE)
