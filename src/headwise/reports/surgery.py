"""HTML page of a pruning or a regrouping: the result, the curve, and a table of all heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from headwise.reports.pictures import LINE, SERIES, SOFT, draw_svg
from headwise.reports.report import library_versions
from headwise.reports.templates import secure_page, template_environment
from headwise.surgery._prune import Pruning
from headwise.surgery.quality import describe_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headwise.surgery._regroup import Regrouping

HEIGHT = 3.2  # inches
AXIS, DOT = 360, 8  # of the drawing of a layer: its width, and the radius of a head
REPAIRED = {
    "zero": "others at zero",
    "mean": "others at their mean output",
    "refit": "the output projection fitted",
}
MERGED = {
    "fitted": "merged by the maps that lose least",
    "aligned": "means of turned heads",
    "mean": "means",
}


def render_cut(
    result: Pruning | Regrouping,
    model: str,
    commands: Sequence[str] = (),
    facts: Sequence[str] = (),
) -> str:
    """Return the page of a pruning or a regrouping as HTML.

    ``commands`` load what was written, and ``facts`` say in sentences what it costs and how it was
    made.
    """
    is_pruning = isinstance(result, Pruning)
    table = result.plan.table() if is_pruning else []
    effects = [x for row in table for x in row["effects"]]
    ends = min([0.0, *effects]), max([0.0, *effects]) or 1.0
    rows = {row["layer"].rstrip("."): _place_heads(row, *ends) for row in table}
    versions = library_versions()
    page = (
        template_environment()
        .get_template("surgery.html" if is_pruning else "regroup.html")
        .render(
            model=model,
            plan=result.plan,
            result=result,
            curve=draw_curve(result),
            commands=commands,
            facts=facts,
            change=result.change,
            interval=describe_interval(result.after - result.before),
            means=(float(result.before.mean()), float(result.after.mean())),
            version=versions["headwise"],
            torch=versions["torch"],
            rows=rows.items(),
            ends=[(_place(x, *ends), x) for x in sorted({0.0, *ends})],
            axis=AXIS,
            dot=DOT,
        )
    )
    return secure_page(page)


def _place(effect: float, least: float, most: float) -> float:
    """Return where an effect stands on the axis: by the square root, since most are small."""
    low, high, at = (math.copysign(math.sqrt(abs(x)), x) for x in (least, most, effect))
    return DOT + (AXIS - 2 * DOT) * (at - low) / (high - low)


def _place_heads(row: dict[str, Any], least: float, most: float) -> list[dict[str, Any]]:
    """Return the dots of a layer: each in the lowest lane in which it touches no other."""
    ends: list[float] = []  # of the last dot of each lane
    dots = []
    for effect, head in sorted((effect, head) for head, effect in enumerate(row["effects"])):
        x = _place(effect, least, most)
        lane = next((n for n, end in enumerate(ends) if x - end >= 2 * DOT), len(ends))
        ends[lane:] = [x, *ends[lane + 1 :]]
        gone = head in row["gone"]
        dots.append({"number": head, "effect": effect, "is_gone": gone, "x": x, "lane": lane})
    return dots


def draw_curve(result: Pruning | Regrouping) -> Markup:
    """Return the curve of quality against a number of heads as SVG, with the result of the cut."""
    plan, after = result.plan, float(result.after.mean())
    note = ""
    if isinstance(result, Pruning):
        numbers, repair = [point.kept for point in result.curve], result.plan.repair
        unit, axis = "heads", "heads that stay"
        ways = {REPAIRED[way]: [getattr(p, way) for p in result.curve] for way in ("mean", "zero")}
        chosen = next(point.kept for point in result.curve if point.is_chosen)
        counted, cut = "the number of heads that stay", f"with {chosen} heads, {REPAIRED[repair]}"
        note = ", fitted" if repair == "refit" else ""
    else:
        numbers, how = [point.kv_heads for point in result.curve], result.plan.how
        unit, axis = "kv heads", "kv heads in each layer"
        ways = {MERGED[how]: [point.merged for point in result.curve]}
        ways["means of neighbours"] = [point.mean for point in result.curve]
        chosen = result.plan.kv_heads
        counted, cut = "the number of kv heads in each layer", f"to {chosen}, {MERGED[how]}"
    caption = (
        f"{plan.quality.title}, by {counted}, from {numbers[0]} to {numbers[-1]}. The cut {cut}: "
        f"{after:.4f}."
    )

    def draw(figure: Figure) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = figure.subplots()
        for (label, values), colour in zip(ways.items(), SERIES, strict=False):
            axes.plot(numbers, values, marker="o", markersize=3.5, color=colour, label=label)
        axes.axvline(chosen, color=SOFT, linewidth=1, linestyle=(0, (3, 3)))
        ring: dict[str, Any] = {"marker": "o", "markersize": 8, "fillstyle": "none"}
        words = f"{chosen} {unit}: {after:.4f}{note}"
        axes.plot([chosen], [after], linestyle="", color=SOFT, label=words, clip_on=False, **ring)
        axes.margins(x=0.04, y=0.1)
        axes.set(xlabel=axis, ylabel="quality")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y", color=LINE)
        # Above the axes, so that it hides no point.
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)

    return draw_svg(draw, caption, name="curve", height=HEIGHT)
