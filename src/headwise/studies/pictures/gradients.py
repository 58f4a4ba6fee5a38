"""The picture of the question `gradients`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwise.studies.pictures.style import INK, LINE, SERIES, SOFT
from headwise.studies.question import Numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WEIGHTS = {"q": "queries", "k": "keys", "v": "values", "o": "output"}


def draw(figure: Figure, n: Numbers) -> None:
    """Above: which weights reach which scores. Below: how alike gradients and weights are."""
    figure.set_figheight(6.4)
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(1.35, 1), hspace=0.06)[
        :, 0
    ]
    _draw_reach(above.subplots(), n)
    left, right = below.subplots(1, 2, width_ratios=(1, 1.25), gridspec_kw={"wspace": 0.12})
    _draw_cosines(left, n)
    _draw_distances(right, n)


def _draw_reach(axes: Axes, n: Numbers) -> None:
    """A square for each part of the weights and each head; coloured where there is a gradient."""
    many, gap = n["many"], 1.5
    lines = [*n["reach"]["1"], *n["reach"][str(many)]]
    heights = [0.0, *(row + 1.7 for row in range(many))]
    for line, y in zip(lines, heights, strict=True):
        for place, reached in enumerate(line):
            part = place // many
            look = {"color": SERIES[part]} if reached else {"color": SOFT, "alpha": 0.3}
            axes.bar(place + gap * part, 0.86, 0.86, y, align="edge", linewidth=0, **look)
    for part, (name, word) in enumerate(WEIGHTS.items()):
        x = part * (many + gap) + many / 2
        axes.text(x, -0.35, f"w{name} ({word})", ha="center", va="bottom", color=SERIES[part])
    axes.text(-0.6, 0.43, "scores of the only head", ha="right", va="center")
    for head in range(many):
        text = "scores of head 0" if head == 0 else f"head {head}"
        axes.text(-0.6, head + 2.13, text, ha="right", va="center", color=SOFT if head else INK)
    axes.set_title("What a head's scores (not the loss) depend on", loc="left")
    axes.set_xlim(-11.4, len(lines[0]) + 3 * gap)
    axes.set_ylim(heights[-1] + 1, -1.4)
    axes.set_axis_off()


def _draw_cosines(axes: Axes, n: Numbers) -> None:
    """How alike the gradients of the loss are, a bar for each of the four."""
    bars = axes.bar(
        [f"w{name}" for name in WEIGHTS],
        [n["cosine"][name] for name in WEIGHTS],
        0.6,
        color=SERIES[: len(WEIGHTS)],
    )
    axes.bar_label(bars, [f"{n['cosine'][name]:.2f}" for name in WEIGHTS], padding=3, color=INK)
    axes.set_ylim(0, 1)
    axes.set_ylabel("cosine (the same: 1)")
    axes.set_title(f"Gradients of the loss:\none head against {n['many']}", loc="left")
    axes.grid(axis="y", color=LINE)


def _draw_distances(axes: Axes, n: Numbers) -> None:
    """How far the weights of one head and of many are from each other over the steps."""
    last, top = n["steps"][-1], max(max(line) for line in n["distance"].values())
    place = -top
    for name, line in sorted(n["distance"].items(), key=lambda item: float(item[1][-1])):
        colour = SERIES[list(WEIGHTS).index(name)]
        place = max(line[-1] - 0.05 * top, place + 0.12 * top)  # labels of lines that end together
        axes.plot(n["steps"], line, color=colour)
        axes.plot([1.01 * last, 1.09 * last], [line[-1], place], color=colour, linewidth=0.8)
        axes.text(1.11 * last, place, f"w{name} {100 * line[-1]:.0f} %", color=colour, va="center")
    axes.set_xlim(0, 1.42 * last)
    axes.set_xticks([step for step in n["steps"] if step % 25 == 0])
    axes.set_ylim(0, 1.08 * top)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.set_xlabel("training step")
    axes.set_ylabel("relative difference")
    axes.set_title(f"Weights during training:\none head against {n['many']}", loc="left")
    axes.grid(axis="y", color=LINE)
