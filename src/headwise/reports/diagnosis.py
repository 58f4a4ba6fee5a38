"""HTML page of a diagnosis: the verdict, the causes with their repair, and the evidence."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from markupsafe import Markup, escape

from headwise.function.records import STAGES
from headwise.identify.catalogue import Page
from headwise.identify.comparison import (
    FunctionComparison,
    LayerComparison,
    ModelComparison,
    StageGaps,
)
from headwise.identify.results import Diagnosis, Verdict
from headwise.reports import images
from headwise.reports.images import RGB, viridis_colour
from headwise.reports.report import library_versions
from headwise.reports.templates import secure_page, template_environment
from headwise.support.text import describe_count

LEAST, MOST = 1e-6, 1.0  # sizes at the ends of the colour scale, which is logarithmic
TICKS = (1e-6, 1e-4, 1e-2, 1.0)
MOST_POSITIONS = 64  # columns of the third table
MOST_NUMBERS = 12  # heads up to which cells have numbers


@dataclass(frozen=True)
class HeatCell:
    """One cell of the tables."""

    text: str = ""  # the size, "=" where rounding explains it, "" where it was not compared
    title: str = ""  # the cell in words
    colour: RGB | None = None  # None where rounding explains it, and for another shape
    span: int = 1  # columns that the cell takes


@dataclass(frozen=True)
class StageRow:
    """One stage in both tables, where a size is the largest of all calls."""

    stage: str
    by_input: tuple[HeatCell, ...]  # a cell for each call
    by_head: tuple[HeatCell, ...]  # a cell for each head, or for each kv head
    by_position: tuple[HeatCell, ...]  # a cell for each of the first positions
    is_parted: bool  # rounding does not explain the differences
    is_explained: bool  # the named causes explain them
    causes: tuple[str, ...]


@dataclass(frozen=True)
class StageTables:
    """The tables of one attention."""

    function: FunctionComparison
    rows: tuple[StageRow, ...]
    calls: tuple[tuple[str, int], ...]  # (input, number of the call): columns of the first table
    heads: int  # columns of the second
    layer: str = ""  # the name of the attention in its model, if it has one

    @property
    def position_count(self) -> int:
        """Number of positions in the third table; 0 where all stages part at all of them."""
        is_told = any(stage.positions is not None for stage in self.function.parted)
        return max((len(row.by_position) for row in self.rows), default=0) if is_told else 0

    @property
    def has_room_for_numbers(self) -> bool:
        """True if the cells of heads are wide enough for numbers."""
        return self.heads <= MOST_NUMBERS


class LayerRow(NamedTuple):
    """One attention of a model, with a cell for each stage."""

    layer: LayerComparison
    cells: tuple[HeatCell, ...]
    causes: tuple[str, ...]


def stage_tables(function: FunctionComparison, layer: str = "") -> StageTables:
    rows = stage_rows(function)
    heads = max((sum(cell.span for cell in row.by_head) for row in rows), default=1)
    return StageTables(function, tuple(rows), tuple(list_compared_calls(function)), heads, layer)


def layer_rows(model: ModelComparison, stages: Sequence[str]) -> list[LayerRow]:
    """Return a row for each attention of a model, with cells for these stages."""
    rows = []
    for layer in model.layers:
        gaps = {gap.stage: gap for gap in layer.comparison.gaps}
        cells = (
            _cell_of_compared_call(gaps.get(stage), layer.name, (stage, 0)) for stage in stages
        )
        rows.append(LayerRow(layer, tuple(cells), tuple(model.cause_names_of(layer))))
    return rows


def difference_scale_position(size: float) -> float:
    """Return the position of a relative difference on the colour scale, 0 to 1."""
    if size <= LEAST:
        return 0.0
    return min(math.log(size / LEAST) / math.log(MOST / LEAST), 1.0)


def difference_percent_text(size: float) -> str:
    """Return a relative difference in per cent; "shape" where it is infinite."""
    if not math.isfinite(size):
        return "shape"
    percent = 100 * size
    if not size:
        return "0"
    if percent >= 9.95:
        return f"{percent:.0f} %" if percent < 999.5 else ">999 %"
    return f"{percent:.0e} %" if percent < 0.01 else f"{percent:.2g} %"


def list_compared_calls(function: FunctionComparison) -> list[tuple[str, int]]:
    return list(dict.fromkeys((gap.probe, gap.call) for gap in function.gaps))


def stage_rows(function: FunctionComparison) -> list[StageRow]:
    calls = list_compared_calls(function)
    heads = max((len(gap.sizes) for gap in function.gaps), default=1)
    explained = {stage.stage for stage in function.parted if stage.is_explained}
    rows = []
    for stage in function.stages:
        gaps = {(gap.probe, gap.call): gap for gap in function.gaps if gap.stage == stage}
        is_parted = not all(gap.is_rounding for gap in gaps.values())
        rows.append(
            StageRow(
                stage,
                tuple(_cell_of_compared_call(gaps.get(call), stage, call) for call in calls),
                tuple(_cells_by_head(list(gaps.values()), stage, heads)),
                tuple(_make_position_cells(list(gaps.values()), stage)),
                is_parted,
                stage in explained,
                tuple(cause.name for cause in function.causes if stage in cause.stages),
            )
        )
    return rows


def _cell_of_compared_call(gap: StageGaps | None, stage: str, call: tuple[str, int]) -> HeatCell:
    name = f"{stage}, {call[0]}"
    if gap is None:
        return HeatCell(title=f"{name}: not compared")
    return _difference_cell(name, gap.largest_relative_difference, is_rounding=gap.is_rounding)


def _cells_by_head(gaps: Sequence[StageGaps], stage: str, heads: int) -> Iterable[HeatCell]:
    counts = {len(gap.sizes) for gap in gaps}
    if len(counts) != 1:  # not compared, or of another shape in some calls
        yield (
            _difference_cell(stage, math.inf, is_rounding=False, span=heads)
            if gaps
            else HeatCell(title=f"{stage}: not compared", span=heads)
        )
        return
    [count] = counts
    span = heads // count if heads % count == 0 else 1
    for head in range(count):
        parted = [gap.sizes[head] for gap in gaps if gap.shares[head] > 1]
        size = max(parted or [gap.sizes[head] for gap in gaps])
        noun = "kv head" if count < heads else "head"
        name = f"{stage}, {noun} {head}" if count > 1 or heads == 1 else stage
        yield _difference_cell(name, size, is_rounding=not parted, span=span)


def _make_position_cells(gaps: Sequence[StageGaps], stage: str) -> Iterable[HeatCell]:
    rows = [gap.by_position for gap in gaps if not gap.call]
    for position in range(min(max(map(len, rows), default=0), MOST_POSITIONS)):
        size = max(row[position] for row in rows if position < len(row))
        yield _difference_cell(f"{stage}, position {position}", size, is_rounding=not size)


def _difference_cell(name: str, size: float, *, is_rounding: bool, span: int = 1) -> HeatCell:
    if is_rounding:
        return HeatCell("=", f"{name}: equal to rounding", span=span)
    if not math.isfinite(size):
        return HeatCell(difference_percent_text(size), f"{name}: of another shape", span=span)
    title = f"{name}: differs by {size:.2g} of its size"
    return HeatCell(
        difference_percent_text(size), title, viridis_colour(difference_scale_position(size)), span
    )


MOST_TENSORS = 200  # in a list; more are only counted
MOST_GROUPS = 4  # of layers with tables of their own
MOST_NAMES = 8  # of layers in a heading


@dataclass(frozen=True, eq=False, kw_only=True)
class DiagnosisReport:
    """A diagnosis with the names of what was compared, which may be empty."""

    diagnosis: Diagnosis
    first: str = ""
    second: str = ""
    call: str = "headwise.compare(first, second)"  # or the command that compares them again
    versions: Mapping[str, str] = field(default_factory=library_versions)

    @property
    def verdict_css_class(self) -> str:
        """The class of the box with the verdict: "", "note" or "bad"."""
        if self.diagnosis.verdict in (Verdict.INCONCLUSIVE, Verdict.UNDER_MASK):
            return "note"
        return "" if self.diagnosis else "bad"

    @property
    def output_difference_sentence(self) -> str:
        """A sentence on the difference of the outputs; "" where they are equal to the last bit."""
        comparison = self.diagnosis.function or self.diagnosis.model
        if (
            comparison is None
            or self.diagnosis.verdict is Verdict.SAME
            or not comparison.output_gap
        ):
            return ""
        if self.diagnosis.model is not None and self.diagnosis.model.uncompared:
            return f"The outputs were not compared: {self.diagnosis.model.uncompared}."
        if not math.isfinite(comparison.output_gap):
            return "The outputs have other shapes."
        size = difference_percent_text(comparison.output_gap)
        return f"The outputs differ by {size} of their size at most."

    @property
    def compared_side_labels(self) -> tuple[str, str]:
        """The two in words: the name, and the kind or the layout."""
        comparison = self.diagnosis.function or self.diagnosis.model
        layouts = self.diagnosis.layouts
        if comparison is not None:
            kinds = comparison.kinds
        else:
            names = ("?", "?") if layouts is None else (layouts[0].name, layouts[1].name)
            kinds = (f"layout {names[0]}", f"layout {names[1]}")
        first, second = (
            f"{name}: {kind}" if name else kind
            for name, kind in zip((self.first, self.second), kinds, strict=True)
        )
        return first, second

    @property
    def differing_layer_groups(self) -> list[tuple[list[LayerComparison], FunctionComparison]]:
        """The attentions that differ, with their comparison; no layers for a single attention."""
        function, model = self.diagnosis.function, self.diagnosis.model
        if model is not None:
            return [(layers, layers[0].comparison) for layers in model.differing_layers_by_causes]
        return [([], function)] if function is not None and function.parted else []

    @property
    def shown_stage_tables(self) -> list[StageTables]:
        """The tables of a single attention, or of the first of each group of layers."""
        if self.diagnosis.function is not None:
            return [stage_tables(self.diagnosis.function)]
        return [
            stage_tables(function, layers[0].name)
            for layers, function in self.differing_layer_groups[:MOST_GROUPS]
        ]


def mark_quoted(text: object) -> Markup:
    """Return a text in which quoted names of tensors are code."""
    return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", str(escape(text))))


def render_markdown(text: str) -> Markup:
    """Render what the pages of causes hold of Markdown: headings, lists, code and bold words."""
    blocks = []
    for n, part in enumerate(re.split(r"```\w*\n(.*?)```", text, flags=re.S)):
        if n % 2:
            blocks.append(Markup("<pre><code>{}</code></pre>").format(part))
            continue
        for block in filter(None, re.split(r"\n{2,}", part.strip())):
            inline = Markup(re.sub(r"\*\*(\w[^*<]*)\*\*", r"<b>\1</b>", str(mark_quoted(block))))
            if block.startswith("## "):
                blocks.append(Markup("<h4>{}</h4>").format(inline[3:]))
            elif block.startswith("- "):
                items = re.split(r"^- ", inline, flags=re.M)[1:]
                items = [Markup("<li>{}</li>").format(Markup(each.strip())) for each in items]
                blocks.append(Markup("<ul>{}</ul>").format(Markup("").join(items)))
            else:
                blocks.append(Markup("<p>{}</p>").format(inline))
    return Markup("\n").join(blocks)


def render_diagnosis_page(report: DiagnosisReport) -> str:
    environment = template_environment()
    environment.filters |= {
        "css": images.css_colour,
        "ink": images.text_colour_on,
        "quoted": mark_quoted,
        "markdown": render_markdown,
    }
    diagnosis, groups = report.diagnosis, report.differing_layer_groups
    model, layers = diagnosis.model, () if diagnosis.model is None else diagnosis.model.layers
    compared = {stage for layer in layers for stage in layer.comparison.stages}
    stages = [stage for stage in STAGES if stage in compared]
    paths = [cause.page for _, each in groups for cause in each.causes]
    paths += [page for module in diagnosis.moves or () for page in module.pages if page]
    page = environment.get_template("diagnosis.html").render(
        report=report,
        version=report.versions["headwise"],
        diagnosis=diagnosis,
        sides=report.compared_side_labels,
        function=diagnosis.function,
        model=model,
        layers=[] if model is None else layer_rows(model, stages),
        stages=stages,
        cause_count=sum(len(function.causes) for _, function in groups),
        cause_pages={path: Page.read(path) for path in dict.fromkeys(paths)},
        most=MOST_TENSORS,
        most_names=MOST_NAMES,
        gradient=Markup(images.css_gradient()),
        ticks=[(size, 100 * difference_scale_position(size)) for size in TICKS],
        describe_count=describe_count,
    )
    return secure_page(page)


def render_in_frame(diagnosis: Diagnosis) -> str:
    """Return the page in a frame for a notebook, so that styles do not mix."""
    page = escape(render_diagnosis_page(DiagnosisReport(diagnosis=diagnosis)))
    return f'<iframe srcdoc="{page}" width="100%" height="600" frameborder="0"></iframe>'
