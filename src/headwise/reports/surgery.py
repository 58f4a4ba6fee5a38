"""HTML page of a pruning or a regrouping: the result, the curve, and a table of all heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from headwise.reports.images import viridis_colour
from headwise.reports.pictures import LINE, SERIES, SOFT, draw_svg
from headwise.reports.report import library_versions
from headwise.reports.templates import secure_page, template_environment

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headwise.surgery._prune import Point, Pruning

HEIGHT = 3.2  # inches


@dataclass(frozen=True)
class HeadCell:
    """One head in the table: its effect, and whether it is gone."""

    number: int
    effect: float
    is_gone: bool
    share: float  # of the largest effect, 0 to 1


def head_rows(table: Sequence[dict[str, Any]]) -> list[tuple[str, list[HeadCell]]]:
    """Return the name and the heads of each layer, from the table of a plan."""
    most = max((abs(x) for row in table for x in row["effects"]), default=0.0) or 1.0
    return [
        (
            row["layer"].rstrip("."),
            [
                HeadCell(n, effect, n in row["gone"], max(effect, 0.0) / most)
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
        curve=draw_curve(result.curve, result.plan.quality.title),
        change=(change, low, high),
        means=(float(result.before.mean()), float(result.after.mean())),
        colour=lambda share: "#{:02x}{:02x}{:02x}".format(*viridis_colour(share**0.5)),
        commands=commands,
        version=versions["headwise"],
        torch=versions["torch"],
    )
    return secure_page(page)


def draw_curve(points: Sequence[Point], title: str) -> Markup:
    """Return the curve of quality against heads kept as SVG, with the chosen number marked."""
    chosen = next((point for point in points if point.is_chosen), points[-1])
    caption = (
        f"{title}, by the number of heads that stay, from {points[0].kept} to {points[-1].kept}. "
        f"With {chosen.kept} heads: {chosen.mean:.4f} by means, {chosen.zero:.4f} by zeros."
    )
    return draw_svg(
        lambda figure: _draw_curve(figure, points, chosen),
        caption,
        name="curve",
        height=HEIGHT,
    )


def _draw_curve(figure: Figure, points: Sequence[Point], chosen: Point) -> None:
    from matplotlib.ticker import MaxNLocator

    axes = figure.subplots()
    kept = [point.kept for point in points]
    ways = ("others at their mean output", "mean"), ("others at zero", "zero")
    for (label, name), colour in zip(ways, SERIES, strict=False):
        values = [getattr(point, name) for point in points]
        axes.plot(kept, values, marker="o", markersize=3.5, color=colour, label=label)
    axes.axvline(chosen.kept, color=SOFT, linewidth=1, linestyle=(0, (3, 3)))
    axes.annotate(
        f"{chosen.kept} heads: {chosen.mean:.4f}",
        (chosen.kept, chosen.mean),
        (6, -14),
        textcoords="offset points",
        color=SOFT,
    )
    axes.set(xlabel="heads that stay", ylabel="quality")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color=LINE)
    axes.legend(loc="lower right")
