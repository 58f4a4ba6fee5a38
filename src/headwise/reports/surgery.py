"""HTML page of a pruning or a regrouping: the result, the curve, and a table of all heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from headwise.reports.images import css_colour, viridis_colour, weight_position
from headwise.reports.pictures import LINE, SERIES, SOFT, draw_svg
from headwise.reports.report import library_versions
from headwise.reports.templates import secure_page, template_environment

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headwise.surgery._prune import Pruning

HEIGHT = 3.2  # inches
REPAIRED = {
    "zero": "others at zero",
    "mean": "others at their mean output",
    "refit": "the output projection fitted",
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


def render_pruning(result: Pruning, *, model: str, commands: Sequence[str] = ()) -> str:
    """Return the page of a pruning as HTML.

    Args:
        result: the pruning.
        model: the name of the model.
        commands: lines that load what was written.
    """
    versions, (change, low, high) = library_versions(), result.change
    template = template_environment().get_template("surgery.html")
    page = template.render(
        model=model,
        plan=result.plan,
        result=result,
        rows=head_rows(result.plan.table()),
        curve=draw_curve(result),
        change=(change, low, high),
        means=(float(result.before.mean()), float(result.after.mean())),
        commands=commands,
        version=versions["headwise"],
        torch=versions["torch"],
    )
    return secure_page(page)


def draw_curve(result: Pruning) -> Markup:
    """Return the curve of quality against heads kept as SVG, with the result of the cut marked."""
    points, title = result.curve, result.plan.quality.title
    chosen = next(point for point in points if point.is_chosen)
    after, words = float(result.after.mean()), REPAIRED[result.plan.repair]
    caption = (
        f"{title}, by the number of heads that stay, from {points[0].kept} to {points[-1].kept}. "
        f"The cut with {chosen.kept} heads, {words}: {after:.4f}."
    )
    return draw_svg(
        lambda figure: _draw_curve(figure, result, chosen.kept),
        caption,
        name="curve",
        height=HEIGHT,
    )


def _draw_curve(figure: Figure, result: Pruning, chosen: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes, repair, after = figure.subplots(), result.plan.repair, float(result.after.mean())
    kept = [point.kept for point in result.curve]
    for name, colour in zip(("mean", "zero"), SERIES, strict=False):
        values = [getattr(point, name) for point in result.curve]
        axes.plot(kept, values, marker="o", markersize=3.5, color=colour, label=REPAIRED[name])
    axes.axvline(chosen, color=SOFT, linewidth=1, linestyle=(0, (3, 3)))
    label = REPAIRED[repair] if repair == "refit" else None
    axes.plot(
        [chosen],
        [after],
        marker="o",
        markersize=8,
        fillstyle="none",
        linestyle="",
        color=SOFT,
        label=label,
    )
    axes.annotate(
        f"{chosen} heads: {after:.4f}",
        (chosen, after),
        (8, -14),
        textcoords="offset points",
        color=SOFT,
    )
    axes.set(xlabel="heads that stay", ylabel="quality")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color=LINE)
    axes.legend(loc="best")
