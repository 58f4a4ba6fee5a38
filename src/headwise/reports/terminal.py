"""Terminal output of a scan, for 80 columns and with or without colours."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from headwise.reports import report as view
from headwise.reports.images import css_colour, text_colour_on
from headwise.support.text import describe_count

if TYPE_CHECKING:
    from headwise.scanning.diff import HeadChange, ScanDiff
    from headwise.scanning.result import HeadScan

WIDTH = 80  # columns of `print`
LEVELS = "▁▂▃▄▅▆▇█"
NO_VALUE = "·"
MOST_ROWS = 48  # layers of one picture
MOST_NAMES = 3  # layers that are named
GAP = 2  # columns between pictures, and of an indent

# ---- a scan --------------------------------------------------------------------------------------


def scan_text(scan: HeadScan) -> str:
    """Return the text of ``print(scan)``: the report of the scan alone, without colours."""
    report = view.ScanReport.of(scan)
    with _captured() as (console, lines):
        print_input_and_standouts(report, console)
        print_statistic_grid(report, console)
    return "\n".join(lines)


def diff_text(diff: ScanDiff) -> str:
    """Return the text of ``print(diff)``: the largest changes."""
    with _captured() as (console, lines):
        _print_changes(diff.changes(), console, f"{diff!r}. ")
    return "\n".join(lines)


def _print_changes(changes: list[HeadChange], console: Console, opening: str = "") -> None:
    if not changes:
        _print_paragraph(console, f"{opening}{view.NO_CHANGE}")
        return
    _print_paragraph(console, f"{opening}{view.CHANGE_RULE}")
    for change in changes:
        console.print(indent_content(Text(change.sentence)))
    console.print()


@contextmanager
def _captured() -> Iterator[tuple[Console, list[str]]]:
    lines: list[str] = []
    # In a notebook, rich would write to the cell and not to the file without force_jupyter=False.
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, force_jupyter=False)
    with console.capture() as capture:
        yield console, lines
    lines += (line.rstrip() for line in capture.get().rstrip().splitlines())


def print_input_and_standouts(report: view.ScanReport, console: Console) -> None:
    """Print the input, the notes, and the heads that stand out, or what changed."""
    _print_paragraph(console, f"{report.title}: {report.about}; {report.sizes_text}.")
    _print_paragraph(console, f"Input: {report.read}. {report.chosen}")
    if same := report.same_function:
        _print_paragraph(console, same.summary_sentences, "green" if same.holds else "bold red")
    for note in report.all_notes:
        _print_paragraph(console, f"Note: {note}.", "bold red")
    if report.second is not None:
        _print_changes(report.changes, console)
    elif heads := report.standouts:
        table = make_table([("layer", True), ("head", True), ("heads that stand out", False)])
        table.add_column("middle head", justify="right")
        for standout in heads:
            position = (str(standout.head.layer_index), str(standout.head.head))
            table.add_row(*position, Text(standout.sentence), Text(standout.middle))
        console.print(table)
        console.print()
    elif report.num_heads > 1:
        _print_paragraph(console, f"No head stands out. {view.RULE}")


def print_statistic_grid(report: view.ScanReport, console: Console) -> None:
    """Print every head in the statistic that tells heads apart best, and what is missing."""
    if (statistic := view.clearest_statistic(report.scan)) is not None:
        names = [f"{row} is {name}" for row, name in enumerate(report.scan.layers)]
        skipped = ["..."] if len(names) > MOST_NAMES + 1 else []
        shown = [*names[:MOST_NAMES], *skipped, *names[MOST_NAMES:][-1:]]
        _print_paragraph(
            console,
            "Every head: a row is a layer, a column a head, both counted from 0. In per cent, "
            f"unless a unit is given. Layers: {', '.join(shown)}.",
        )
        console.print(draw_statistic(statistic, console.width))
        console.print()
    for sentence in report.not_measured_sentences:
        _print_paragraph(console, sentence, "dim")


def draw_statistic(statistic: view.DrawnStatistic, width: int) -> Text:
    """Draw layers x heads, as numbers if they fit into the width, else as a bar for each head."""
    rows, scale = statistic.rows, statistic.scale
    heads = len(rows[0])
    left = len(str(len(rows) - 1)) + 1
    cell = 1 + max(2, *(len(scale.format_short(v)) for row in rows for v in row if v == v))
    if left + cell * heads > width:
        cell = 1
    drawn_heads = min(heads, (width - left) // cell)
    unit = f", {statistic.unit}" if scale.kind == "range" else ""
    numbers = "".join(f"{head:{cell}d}" for head in range(drawn_heads))
    if cell == 1:  # the number of every fifth head
        numbers = "".join(f"{head:<5}" for head in range(0, heads, 5))[:drawn_heads].rstrip()
    drawn = Text(f"{statistic.label}{unit}\n")
    drawn.append(" " * left + numbers, "dim")
    for layer, row in enumerate(rows[:MOST_ROWS]):
        drawn.append(f"\n{layer:{left - 1}} ", "dim")
        for value in row[:drawn_heads]:
            drawn.append_text(_grid_cell(scale, value, cell))
    if len(rows) > MOST_ROWS or drawn_heads < heads:
        layers = f"{min(len(rows), MOST_ROWS)} of {describe_count(len(rows), 'layer')}"
        drawn.append(f"\nDrawn: {layers}, {drawn_heads} of {describe_count(heads, 'head')}", "dim")
    return drawn.append("\n")


def _grid_cell(scale: view.Scale, value: float, width: int) -> Text:
    if value != value:
        return Text(f"{NO_VALUE:>{width}}", "dim")
    colour = scale.colour(value)
    if width == 1:
        level = int(max(scale.position(value), 0.0) * len(LEVELS))
        return Text(LEVELS[min(level, len(LEVELS) - 1)], Style(color=css_colour(colour)))
    digits = f"{scale.format_short(value):>{width}}"
    return Text(digits, Style(color=text_colour_on(colour), bgcolor=css_colour(colour)))


# ---- helpers -------------------------------------------------------------------------------------


def make_table(columns: Iterable[tuple[str, bool]]) -> Table:
    """Return an empty table; columns of figures, with True, are set flush right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name, is_figures in columns:
        table.add_column(Text(name), justify="right" if is_figures else "left")
    return table


def _print_paragraph(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text.strip(), style))
    console.print()


def indent_content(content: RenderableType) -> Padding:
    """Return content behind a margin on its left."""
    return Padding(content, (0, 0, 0, GAP))
