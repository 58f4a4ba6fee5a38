"""The picture of the question `quantised`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headwise.studies.pictures.style import INK, LINE, SERIES, SOFT
from headwise.studies.question import Numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {
    "bfloat16": "bfloat16",
    "dynamic": "int8, dynamic",
    "once": "int8, static",
    "every_call": "static, packed\nat every call",
}
COLOURS = {
    "float32": SOFT,
    "bfloat16": SERIES[0],
    "dynamic": SERIES[2],
    "once": SERIES[1],
    "every_call": SERIES[3],
}


def draw(figure: Figure, n: Numbers) -> None:
    """The error after each stage, and the time of a projection."""
    figure.set_figheight(4.4)
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(3.3, 2.5))[0]
    _draw_errors(left.subplots(), n)
    one, many = right.subplots(2, 1, sharex=True)
    _draw_times(one, n["times"]["one"], "Time of a projection: one token")
    _draw_times(many, n["times"]["many"], f"{n['tokens']['many']} tokens")
    many.set_xlabel("times float32's, logarithmic")


def _draw_errors(axes: Axes, n: Numbers) -> None:
    """A line for each form, its name above or below it. Both static forms have the same errors."""
    labels = (
        ("float32", "float32", 9, 2.0),
        ("bfloat16", "bfloat16", -9, 2.0),
        ("once", "int8, static", 6, 6.0),  # a wide line, so that the other is seen upon it
        ("dynamic", "int8, dynamic", -12, 2.0),
    )
    stages = list(n["errors"]["float32"])
    for name, label, above, width in labels:
        values = list(n["errors"][name].values())
        wide = width > 2
        axes.plot(
            range(len(stages)),
            values,
            marker="o",
            markersize=9 if wide else 5,
            linewidth=width,
            color=COLOURS[name],
            alpha=0.55 if wide else 1,
        )
        axes.annotate(
            label,
            (len(stages) - 0.85, values[-1]),
            xytext=(0, above),
            textcoords="offset points",
            ha="right",
            va="bottom" if above > 0 else "top",
            color=COLOURS[name],
        )
    axes.set_yscale("log")
    axes.set_ylim(1e-7, 0.3)
    axes.set_yticks(
        [0.1, 0.01, 0.001, 1e-4, 1e-5, 1e-6, 1e-7],
        ["10 %", "1 %", "0.1 %", "0.01 %", "0.001 %", "0.0001 %", "0.00001 %"],
    )
    axes.set_xticks(
        range(len(stages)), [stage.replace(" ", "\n").replace(",\n", ", ") for stage in stages]
    )
    axes.set_xlim(-0.25, len(stages) - 0.75)
    axes.set_title("Error after each stage", loc="left")
    axes.set_ylabel("relative difference from float64")
    axes.grid(axis="y", color=LINE)


def _draw_times(axes: Axes, times: Mapping[str, float], title: str) -> None:
    """How far each form is from float32's time, to the left where it is faster."""
    from matplotlib.ticker import FixedLocator, NullLocator

    for row, name in enumerate(NAMES):
        time, colour = times[name], COLOURS[name]
        axes.plot([1, time], [row, row], color=colour, linewidth=4, solid_capstyle="butt")
        axes.plot(time, row, marker="o", markersize=8, color=colour)
        axes.annotate(
            f"{time:.2f}",
            (time, row),
            xytext=(8 if time > 1 else -8, 0),
            textcoords="offset points",
            ha="left" if time > 1 else "right",
            va="center",
            color=INK,
        )
    axes.axvline(1, color=SOFT, linewidth=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator([0.1, 0.3, 1, 3, 10]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlim(min(0.1, *times.values()) / 1.2, 1.7 * max(10.0, *times.values()))
    axes.set_yticks(range(len(NAMES)), list(NAMES.values()))
    axes.set_ylim(len(NAMES) - 0.4, -0.6)
    axes.set_title(title, loc="left")
