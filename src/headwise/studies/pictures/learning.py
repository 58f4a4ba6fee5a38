"""The picture of the question `learning`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwise.studies.pictures.style import INK, LINE, SERIES, SOFT, weight_map
from headwise.studies.question import Numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

FEW = {1: "one head", 2: "two heads", 4: "four heads", 8: "eight heads"}


def draw(figure: Figure, n: Numbers) -> None:
    """Error over steps, where each head's weight goes, and the weights on one text."""
    figure.set_figheight(5.7)
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(3.3, 2.3), hspace=0.0)[
        :, 0
    ]
    left, right = above.subplots(1, 2, width_ratios=(3, 2))
    _draw_curves(left, n)
    _draw_looks(right, n)
    _draw_maps(below, n)


def _draw_curves(axes: Axes, n: Numbers) -> None:
    """The error of each number of heads, with its name at the end of the line."""
    for name, colour in _colours(n).items():
        curve = n["curves"][name]
        axes.fill_between(n["at"], curve["best"], curve["worst"], color=colour, alpha=0.2, lw=0)
        axes.plot(n["at"], curve["median"], color=colour)
        axes.annotate(
            FEW[int(name)],
            (n["at"][-1], curve["median"][-1]),
            xytext=(6, 0),
            textcoords="offset points",
            color=colour,
            va="center",
        )
    axes.plot([0, n["steps"]], [n["half"]] * 2, color=INK, lw=0.8, ls=(0, (4, 3)))
    axes.annotate(
        "half of the error",
        (n["steps"], n["half"]),
        xytext=(0, -7),
        textcoords="offset points",
        ha="right",
        va="top",
        color=INK,
    )
    axes.set_yscale("log")
    axes.set_xlim(0, 1.34 * n["steps"])
    axes.set_ylim(top=2)
    axes.set_xticks(range(0, n["steps"] + 1, n["steps"] // 4))
    axes.set_yticks(
        [10.0**-power for power in range(5)], ["100 %", "10 %", "1 %", "0.1 %", "0.01 %"]
    )
    axes.set_xlabel("training step")
    axes.set_ylabel("error left")
    axes.set_title("Error during training", loc="left")
    axes.grid(axis="y", color=LINE)


def _draw_looks(axes: Axes, n: Numbers) -> None:
    """One dot for every head: its weight on either token. The line is all of a head's weight."""
    axes.plot([0, 1], [1, 0], color=SOFT, lw=0.6, zorder=0)
    axes.text(
        0.57, 0.57, "nothing on other tokens", color=SOFT, rotation=-45, ha="center", va="center"
    )
    for name, colour in reversed(_colours(n).items()):
        points = [head for look in n["looks"][name] for head in look]
        axes.scatter(
            [before for before, _ in points],
            [named for _, named in points],
            color=colour,
            alpha=0.6,
        )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
    axes.set_xlim(-0.08, 1.08)
    axes.set_ylim(-0.08, 1.08)
    axes.set_aspect("equal")
    axes.set_xlabel("on the token before")
    axes.set_ylabel("on the named token")
    axes.set_title("Each head's attention weight", loc="left")


def _draw_maps(figure: SubFigure, n: Numbers) -> None:
    """The weights of the first seed's layers on one text, side by side."""
    gap = 0.2
    widths = [width for found in n["maps"].values() for width in (*(1.0 for _ in found), gap)][:-1]
    maps = figure.subplots(1, len(widths), width_ratios=widths)
    places = iter(maps)
    for name, found in n["maps"].items():
        for head, weights in enumerate(found):
            axes = next(places)
            image = weight_map(axes, weights)
            before, named = (_share(share) for share in n["looks"][name][0][head])
            axes.set_xlabel(f"before {before}\nnamed {named}", color=SOFT, size=9)
            if head == 0:
                axes.set_title(FEW[int(name)], color=_colours(n)[name], loc="left")
        if (space := next(places, None)) is not None:
            space.set_axis_off()
    bar = figure.colorbar(image, ax=maps, location="bottom", shrink=0.6, aspect=45)
    bar.set_ticks([0, 0.01, 0.1, 0.5, 1], labels=["0", "1 %", "10 %", "50 %", "100 %"], minor=False)
    bar.outline.set_visible(False)
    bar.set_label("attention weight, on a square-root scale")


def _share(value: float) -> str:
    """A share in per cent, which is not 0 unless it is."""
    return f"{100 * value:.0f} %" if value >= 0.01 else "< 1 %"


def _colours(n: Numbers) -> dict[str, str]:
    """The colour of each number of heads."""
    return {str(heads): colour for heads, colour in zip(n["heads"], SERIES, strict=False)}
