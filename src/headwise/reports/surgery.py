"""HTML page of a pruning or a regrouping: the result, the curve, and a table of all heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from headwise.reports.images import css_colour, viridis_colour, weight_position
from headwise.reports.pictures import LINE, SERIES, SOFT, draw_svg
from headwise.reports.report import library_versions
from headwise.reports.templates import secure_page, template_environment
from headwise.surgery._prune import Pruning

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headwise.surgery._regroup import Regrouping

HEIGHT = 3.2  # inches
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


@dataclass(frozen=True)
class HeadCell:
    """One head in the table: its effect, and whether it is gone."""

    number: int
    effect: float
    is_gone: bool
    colour: str  # by its share of the largest effect


def head_rows(table: Sequence[dict[str, Any]]) -> list[tuple[str, list[HeadCell]]]:
    """Return the name and the heads of each layer, from the table of a plan."""
    most = max((abs(x) for row in table for x in row["effects"]), default=0.0) or 1.0
    return [
        (
            row["layer"].rstrip("."),
            [
                HeadCell(
                    n,
                    effect,
                    n in row["gone"],
                    css_colour(viridis_colour(weight_position(effect / most))),
                )
                for n, effect in enumerate(row["effects"])
            ],
        )
        for row in table
    ]


def render_cut(result: Pruning | Regrouping, model: str, commands: Sequence[str] = ()) -> str:
    """Return the page of a pruning or a regrouping as HTML; ``commands`` load what was written."""
    parts: dict[str, Any] = {"commands": commands}
    if isinstance(result, Pruning):
        name, curve = "surgery.html", draw_curve(result)
        parts["rows"] = head_rows(result.plan.table())
    else:
        name, curve = "regroup.html", draw_merge_curve(result)
    versions = library_versions()
    page = (
        template_environment()
        .get_template(name)
        .render(
            model=model,
            plan=result.plan,
            result=result,
            curve=curve,
            change=result.change,
            means=(float(result.before.mean()), float(result.after.mean())),
            version=versions["headwise"],
            torch=versions["torch"],
            **parts,
        )
    )
    return secure_page(page)


def draw_curve(result: Pruning) -> Markup:
    """Return the curve of quality against heads kept as SVG, with the result of the cut marked."""
    points, repair = result.curve, result.plan.repair
    chosen = next(point.kept for point in points if point.is_chosen)
    caption = (
        f"{result.plan.quality.title}, by the number of heads that stay, from {points[0].kept} to "
        f"{points[-1].kept}. The cut with {chosen} heads, {REPAIRED[repair]}: "
        f"{float(result.after.mean()):.4f}."
    )
    curve = Curve(
        [point.kept for point in points],
        {REPAIRED[way]: [getattr(point, way) for point in points] for way in ("mean", "zero")},
        (chosen, float(result.after.mean())),
        "heads",
        "heads that stay",
        ", fitted" if repair == "refit" else "",
    )
    return draw_svg(curve.draw, caption, name="curve", height=HEIGHT)


def draw_merge_curve(result: Regrouping) -> Markup:
    """Return the curve of quality against kv heads as SVG, with the result of the cut marked."""
    points, how = result.curve, result.plan.how
    after = float(result.after.mean())
    caption = (
        f"{result.plan.quality.title}, by the number of kv heads in each layer, from "
        f"{points[0].kv_heads} to {points[-1].kv_heads}. The cut to {result.plan.kv_heads}, "
        f"{MERGED[how]}: {after:.4f}."
    )
    ways = {MERGED[how]: [point.merged for point in points]}
    ways["means of neighbours"] = [point.mean for point in points]
    numbers, chosen = [point.kv_heads for point in points], (result.plan.kv_heads, after)
    curve = Curve(numbers, ways, chosen, "kv heads", "kv heads in each layer")
    return draw_svg(curve.draw, caption, name="curve", height=HEIGHT)


@dataclass(frozen=True)
class Curve:
    """Curve of quality against a number of heads.

    Attributes:
        numbers: of heads.
        ways: quality by each way, by the words of the legend.
        chosen: the number of heads of the cut, and its quality.
        unit: of the number.
        axis: the name of the axis of numbers.
        note: what the legend says of the cut beside its quality.
    """

    numbers: Sequence[int]
    ways: Mapping[str, Sequence[float]]
    chosen: tuple[int, float]
    unit: str
    axis: str
    note: str = ""

    def draw(self, figure: Figure) -> None:
        """Draw the curve on a figure of matplotlib."""
        from matplotlib.ticker import MaxNLocator

        axes, (number, value) = figure.subplots(), self.chosen
        for (label, values), colour in zip(self.ways.items(), SERIES, strict=False):
            axes.plot(self.numbers, values, marker="o", markersize=3.5, color=colour, label=label)
        axes.axvline(number, color=SOFT, linewidth=1, linestyle=(0, (3, 3)))
        ring: dict[str, Any] = {"marker": "o", "markersize": 8, "fillstyle": "none"}
        words = f"{number} {self.unit}: {value:.4f}{self.note}"
        axes.plot([number], [value], linestyle="", color=SOFT, label=words, **ring)
        axes.set(xlabel=self.axis, ylabel="quality")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y", color=LINE)
        # Above the axes, so that it hides no point.
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
