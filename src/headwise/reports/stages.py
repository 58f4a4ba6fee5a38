"""Differences of stages by input and by head, as coloured cells of two tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headwise.diagnosis.comparison import (
    FunctionComparison,
    LayerComparison,
    ModelComparison,
    StageGaps,
)
from headwise.function.stages import STAGES
from headwise.reports.images import RGB, viridis_colour

LEAST, MOST = 1e-6, 1.0  # sizes at the ends of the colour scale, which is logarithmic
TICKS = (1e-6, 1e-4, 1e-2, 1.0)
MOST_POSITIONS = 64  # columns of the third table
MOST_NUMBERS = 12  # heads up to which cells have numbers


@dataclass(frozen=True)
class HeatCell:
    """One cell of the tables.

    Attributes:
        text: the size, "=" where rounding explains it, "" where the stage was not compared.
        title: the cell in words.
        colour: None where rounding explains the difference, and where the stage has another shape.
        span: columns that the cell takes.
    """

    text: str = ""
    title: str = ""
    colour: RGB | None = None
    span: int = 1


@dataclass(frozen=True)
class StageRow:
    """One stage in both tables.

    Attributes:
        stage: its name.
        by_input: a cell for each call.
        by_head: a cell for each head, or for each kv head; the largest size of all calls.
        by_position: a cell for each of the first positions; the largest size of all calls.
        is_parted: True if rounding does not explain the differences.
        is_explained: True if the named causes explain them.
        causes: the names of these causes.
    """

    stage: str
    by_input: tuple[HeatCell, ...]
    by_head: tuple[HeatCell, ...]
    by_position: tuple[HeatCell, ...]
    is_parted: bool
    is_explained: bool
    causes: tuple[str, ...]


@dataclass(frozen=True)
class StageTables:
    """The two tables of one attention.

    Attributes:
        function: its comparison.
        rows: its stages.
        calls: (input, number of the call): the columns of the first table.
        heads: the columns of the second.
        layer: the name of the attention in its model; "" if it has none.
    """

    function: FunctionComparison
    rows: tuple[StageRow, ...]
    calls: tuple[tuple[str, int], ...]
    heads: int
    layer: str = ""

    @property
    def position_count(self) -> int:
        """Number of positions in the third table; 0 where all stages part at all of them."""
        is_told = any(stage.positions is not None for stage in self.function.parted)
        return max((len(row.by_position) for row in self.rows), default=0) if is_told else 0

    @property
    def has_room_for_numbers(self) -> bool:
        """True if the cells of heads are wide enough for numbers."""
        return self.heads <= MOST_NUMBERS


@dataclass(frozen=True)
class LayerRow:
    """One attention of a model, with a cell for each stage."""

    layer: LayerComparison
    cells: tuple[HeatCell, ...]
    causes: tuple[str, ...]


def stage_tables(function: FunctionComparison, layer: str = "") -> StageTables:
    """Return the tables of an attention."""
    rows = stage_rows(function)
    heads = max((sum(cell.span for cell in row.by_head) for row in rows), default=1)
    return StageTables(function, tuple(rows), tuple(list_compared_calls(function)), heads, layer)


def compared_stages_of_model(model: ModelComparison) -> list[str]:
    """Return the stages that were compared in any layer, in order."""
    compared = {stage for layer in model.layers for stage in layer.comparison.stages}
    return [stage for stage in STAGES if stage in compared]


def layer_rows(model: ModelComparison) -> list[LayerRow]:
    """Return a row for each attention of a model."""
    stages = compared_stages_of_model(model)
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
    """Return (input, number of the call) of each call, in order."""
    return list(dict.fromkeys((gap.probe, gap.call) for gap in function.gaps))


def stage_rows(function: FunctionComparison) -> list[StageRow]:
    """Return a row for each stage that was compared, in the order of the stages."""
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
    """Yield a cell for each position of a first call, as long as the longest of them."""
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
