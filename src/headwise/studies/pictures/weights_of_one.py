"""The picture of the question `weights-of-one`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwise.studies.pictures.style import INK, LINE, SERIES
from headwise.studies.question import Numbers
from headwise.studies.words import say

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(figure: Figure, n: Numbers) -> None:
    """One head against eight over the size of the tokens, above what their softmaxes do there."""
    figure.set_figheight(4.6)
    grid = figure.subplots(2, 2, sharex=True, sharey="row", height_ratios=(1.4, 1))
    top = max(max(sweep["apart"]) for sweep in n["sweep"].values())
    panels = (
        ("ones", "all weights one", n["tokens"]["quiet"]["apart"]),
        ("own", "default initialisation", n["own_apart"]),
    )
    for column, (name, title, share) in zip(grid.T, panels, strict=True):
        above, below = column
        factor = n["quoted"][name]
        above.plot(n["factors"], n["sweep"][name]["apart"], color=SERIES[1])
        above.plot(factor, share, "o", color=SERIES[1])
        above.annotate(
            say("{share:percent} at {factor:g}", {"share": share, "factor": factor}),
            *((factor, share), (-9, 4)),
            textcoords="offset points",
            ha="right",
            color=INK,
        )
        below.plot(n["factors"], n["sweep"][name]["several"], color=SERIES[0])
        below.plot(n["factors"], n["sweep"][name]["one"], color=SERIES[2], linestyle="--")
        above.set_title(title, loc="left")
        above.set_xscale("log")
        below.set_xticks(ticks := [0.001, 0.01, 0.1, 1, 10], [f"{tick:g}" for tick in ticks])
        below.set_xlabel("size of the tokens")
        for axes in column:
            axes.grid(axis="y", color=LINE)
    grid[1][0].text(0.05, 0.55, f"{n['heads']} heads", color=SERIES[0])
    grid[1][0].text(0.011, 0.35, "one head", color=SERIES[2], ha="right")
    grid[0][0].set_ylim(-0.03 * top, 1.1 * top)
    grid[0][0].set_yticks(shares := [0, 0.5, 1], [f"{100 * x:g}\u00a0%" for x in shares])
    grid[0][0].set_ylabel("relative difference\nof the outputs")
    grid[1][0].set_ylim(-0.08, 1.08)
    grid[1][0].set_yticks([0, 1], ["one key", "even"])
    grid[1][0].set_ylabel("softmax")
