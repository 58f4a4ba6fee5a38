"""Results in a terminal of 80 columns, with colours or without: a scan, and a study."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from headwise.reports.png_images import css, ink
from headwise.reports.scan_page import MAP, ScanReport
from headwise.reports.wording import RULE, DrawnStatistic, most_telling, standing_out
from headwise.support.axes import many

if TYPE_CHECKING:
    from headwise.scanning.head_scan import HeadScan
    from headwise.study.question import Answer
    from headwise.study.run import Study

WIDTH = 80  # columns of what `print` shows
LEVELS = "▁▂▃▄▅▆▇█"
NO_VALUE = "·"
MOST_ROWS = 48  # layers of one picture
GAP = 2  # columns between pictures, and of an indent

# ---- a scan --------------------------------------------------------------------------------------


def printed(scan: HeadScan) -> str:
    """Return what ``print(scan)`` shows: the report of the scan alone, without colours."""
    # Rich would otherwise draw into the notebook that it finds itself in, and not into the file.
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, force_jupyter=False)
    with console.capture() as capture:
        show_scan(ScanReport.of(scan), console)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())


def show_scan(report: ScanReport, console: Console) -> None:
    """What was read, every head in a few pictures, and the heads that stand out, in words."""
    _say(console, f"{report.title}: {report.about}; {report.sizes}.")
    _say(console, f"It has read {report.read}. {report.chosen}")
    if same := report.same_function:
        _say(console, same.says, "green" if same.holds else "bold red")
    for note in report.all_notes:
        _say(console, f"Note: {note}.", "bold red")
    pictures, layers = most_telling(report.scan), report.scan.layers
    if pictures:
        _say(
            console,
            "Every head: a row is a layer, a column a head, both counted from 0. In per cent, "
            f"unless a unit is given. Layers: {' to '.join(layers[:1] + layers[1:][-1:])}.",
        )
        drawn: list[RenderableType] = [picture(one, console.width) for one in pictures]
        console.print(Columns(drawn, padding=(0, GAP)))
    if rest := _on_the_page_alone(report, len(pictures)):
        _say(console, rest)
    if found := standing_out(report.scan):
        table = _table({"layer": True, "head": True, "heads that stand out": False})
        table.add_column("middle head", justify="right")
        for one in found:
            place = (str(one.head.layer_index), str(one.head.head))
            table.add_row(*place, Text(one.says), Text(one.middle))
        console.print(table)
    elif report.num_heads > 1:
        _say(console, f"No head stands out. {RULE}")
    for sentence in report.not_measured:
        _say(console, sentence, "dim")


def _on_the_page_alone(report: ScanReport, pictures: int) -> str:
    """What the terminal leaves out."""
    numbers = len(report.scan.scalars)
    rest, maps = numbers - pictures, MAP in report.scan.measured
    left_out = [f"{many(rest, 'more number')} of each head"] if rest else []
    left_out += ["a map of every head"] if maps else []
    if not left_out:
        return ""
    verb = "is" if len(left_out) == 1 and (maps or rest == 1) else "are"
    chosen = f"{pictures} of {numbers} numbers are drawn here. " if rest else ""
    return f"{chosen}On the page {verb} {' and '.join(left_out)}."


def picture(one: DrawnStatistic, width: int) -> Text:
    """Layers x heads: numbers where there is room for them, else a bar for each head."""
    heads = len(one.rows[0])
    left = len(str(len(one.rows) - 1)) + 1
    cell = 1 + max(2, *(len(one.scale.short(v)) for row in one.rows for v in row if v == v))
    if left + cell * heads > width:
        cell = 1
    drawn_heads = min(heads, (width - left) // cell)
    in_unit = f", {one.unit}" if one.scale.kind == "range" else ""
    numbers = "".join(f"{head:{cell}d}" for head in range(drawn_heads))
    drawn = Text(f"{one.label}{in_unit}\n")
    drawn.append(" " * left + (numbers if cell > 1 else _ruler(drawn_heads)), "dim")
    for layer, row in enumerate(one.rows[:MOST_ROWS]):
        drawn.append(f"\n{layer:{left - 1}} ", "dim")
        for value in row[:drawn_heads]:
            drawn.append_text(_cell(one, value, cell))
    if len(one.rows) > MOST_ROWS or drawn_heads < heads:
        some = f"{min(len(one.rows), MOST_ROWS)} of {many(len(one.rows), 'layer')}"
        drawn.append(f"\nDrawn: {some}, {drawn_heads} of {many(heads, 'head')}", "dim")
    return drawn.append("\n")


def _cell(one: DrawnStatistic, value: float, width: int) -> Text:
    if value != value:
        return Text(f"{NO_VALUE:>{width}}", "dim")
    colour = one.scale.colour(value)
    if width == 1:
        return Text(_level(one.scale.position(value)), Style(color=css(colour)))
    return Text(f"{one.scale.short(value):>{width}}", Style(color=ink(colour), bgcolor=css(colour)))


def _level(share: float) -> str:
    """The bar of a share, which is held between 0 and 1."""
    return LEVELS[min(int(max(share, 0.0) * len(LEVELS)), len(LEVELS) - 1)]


def _ruler(heads: int) -> str:
    """Every fifth head by its number."""
    return "".join(f"{head:<5}" for head in range(0, heads, 5))[:heads].rstrip()


# ---- a study -------------------------------------------------------------------------------------


def show_study(result: Study, console: Console, *, whole: bool) -> None:
    """Each question with its verdict; where ``whole``, with its reason, its facts and its table."""
    if result.fallback:
        console.print(f"Not the trained encoder: {result.fallback.reason}.", style="yellow")
        console.print(f"To get it: {result.fallback.remedy}\n", markup=False, soft_wrap=True)
    for answer in result.answers:
        console.print(Text(answer.question.asks, "bold"))
        console.print(_indented(Text(answer.verdict, "" if answer.holds else "bold red")))
        if whole:
            _show_evidence(answer, console)
        console.print()
    for left in result.left_out:
        console.print(Text(left.asks, "bold"))
        said = Text(f"Left out: {left.reason}.\nTo get it: {left.remedy}", "yellow")
        console.print(_indented(said))
        console.print()
    borne_out = sum(answer.holds for answer in result.answers)
    console.print(f"{borne_out} of {len(result.answers)} claims are borne out.")
    if not whole:
        example = result.answers[0].question.id if result.answers else "parameters"
        console.print(
            "The facts and figures of one question by its name, for instance:\n"
            f"headwise study {example}"
        )


def _show_evidence(answer: Answer, console: Console) -> None:
    console.print(_indented(Text(answer.say(answer.question.why), "dim")))
    for held, words in answer.facts:
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_row(Text("✓", "green") if held else Text("✗", "red"), Text(words))
        console.print(_indented(grid))
    if answer.question.table:
        console.print(_indented(_figures(answer.question.table.columns, answer, console)))


def _figures(columns: Sequence[str], answer: Answer, console: Console) -> Table | Group:
    table = _table(dict(zip(columns, answer.are_figures, strict=True)))
    for row in answer.rows:
        table.add_row(*map(Text, row))
    if console.measure(table).minimum <= console.width - 2 * GAP:
        return table
    # Too many columns for this terminal: row by row, each cell beside the name of its column.
    return Group(*(_record(columns, row) for row in answer.rows))


def _record(columns: Sequence[str], row: Sequence[str]) -> Table:
    record = Table.grid(padding=(0, 2, 0, 0))
    record.add_row("", "")
    record.add_row(Text(columns[0], "dim"), Text(row[0], "bold"))
    for name, cell in zip(columns[1:], row[1:], strict=True):
        record.add_row(Text(name, "dim"), Text(cell))
    return record


# ---- what they share -----------------------------------------------------------------------------


def _table(columns: dict[str, bool]) -> Table:
    """An empty table of columns that hold figures, to be set flush right, or words."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name, is_figures in columns.items():
        table.add_column(Text(name), justify="right" if is_figures else "left")
    return table


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text.strip(), style))
    console.print()


def _indented(what: RenderableType) -> Padding:
    return Padding(what, (0, 0, 0, GAP))
