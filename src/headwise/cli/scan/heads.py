"""A scan in a terminal of 80 columns, with colours or without."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from headwise.cli.scan.asked import TABLE
from headwise.reports.pictures import css, ink
from headwise.reports.scan import MAP, ScanReport
from headwise.reports.telling import RULE, Shown, most_telling, standing_out
from headwise.scanning.corpus import PARTS, SCAN

MOST_ROWS = 48  # layers of one picture
LEVELS = "▁▂▃▄▅▆▇█"
GAP = 2


def show(report: ScanReport, console: Console) -> None:
    """What was read, every head in a few pictures, and the heads that stand out, in words."""
    _say(console, f"{report.title}: {report.about}; {report.sizes}.")
    _say(console, f"It has read {report.read}. {report.chosen}")
    if same := report.same_function:
        _say(console, same.says, "green" if same.holds else "bold red")
    for note in report.all_notes:
        _say(console, f"Note: {note}.", "bold red")
    pictures = most_telling(report.scan)
    if pictures:
        _say(
            console,
            "Every head: a row is a layer, a column a head, both counted from 0. In per cent, "
            "unless a unit is given.",
        )
        drawn: list[RenderableType] = [picture(one, console.width) for one in pictures]
        console.print(Columns(drawn, padding=(0, GAP)))
    if rest := _on_the_page_alone(report, len(pictures)):
        _say(console, rest)
    if table := _stand_out(report):
        console.print(table)
    elif report.num_heads > 1:
        _say(console, f"No head stands out. {RULE}")
    for reason, names in report.missing.items():
        _say(console, f"Not measured: {', '.join(names)} ({reason}).", "dim")


def show_kept(folder: Path, console: Console) -> None:
    """Where the scan is kept, and in which files."""
    files = f"{SCAN}, {TABLE} and {PARTS}, with a file for each text"
    console.print(
        f"The scan is kept in {files}:",
        str(folder.absolute()),
        sep="\n",
        markup=False,
        soft_wrap=True,
    )


def _on_the_page_alone(report: ScanReport, pictures: int) -> str:
    """What the terminal leaves out."""
    rest = len(report.scan.scalars) - pictures
    maps = MAP in report.scan.measured
    left_out = [f"{rest} more number{'s' if rest > 1 else ''} of each head"] if rest else []
    left_out += ["a map of every head"] if maps else []
    if not left_out:
        return ""
    verb = "is" if len(left_out) == 1 and (maps or rest == 1) else "are"
    chosen = f"{pictures} of {len(report.scan.scalars)} numbers are drawn here. " if rest else ""
    return f"{chosen}On the page {verb} {' and '.join(left_out)}."


def picture(one: Shown, width: int) -> Text:
    """Layers x heads: numbers where there is room for them, else a bar for each head."""
    heads = len(one.rows[0])
    left = len(str(len(one.rows) - 1)) + 1
    cell = 1 + max(2, *(len(one.scale.short(v)) for row in one.rows for v in row if v == v))
    if left + cell * heads > width:
        cell = 1
    drawn_heads = min(heads, (width - left) // cell)
    in_unit = f", {one.unit}" if one.scale.kind == "range" else ""
    drawn = Text(f"{one.label}{in_unit}\n")
    drawn.append(" " * left + _ruler(drawn_heads, cell), "dim")
    for layer, row in enumerate(one.rows[:MOST_ROWS]):
        drawn.append(f"\n{layer:{left - 1}} ", "dim")
        for value in row[:drawn_heads]:
            drawn.append_text(_cell(one, value, cell))
    if len(one.rows) > MOST_ROWS or drawn_heads < heads:
        drawn.append("\nNot all fit here; the page has them.", "dim")
    return drawn.append("\n")


def _cell(one: Shown, value: float, width: int) -> Text:
    if value != value:
        return Text(f"{'·':>{width}}", "dim")
    colour = one.scale.colour(value)
    if width > 1:
        return Text(
            f"{one.scale.short(value):>{width}}", Style(color=ink(colour), bgcolor=css(colour))
        )
    place = min(max(one.scale.position(value), 0.0), 1.0)
    return Text(LEVELS[min(int(place * len(LEVELS)), len(LEVELS) - 1)], Style(color=css(colour)))


def _ruler(heads: int, cell: int) -> str:
    if cell > 1:
        return "".join(f"{head:{cell}d}" for head in range(heads))
    return "".join(f"{head:<5}" for head in range(0, heads, 5))[:heads]


def _stand_out(report: ScanReport) -> Table | None:
    found = standing_out(report.scan)
    if not found:
        return None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("layer", "head"):
        table.add_column(name, justify="right")
    table.add_column("heads that stand out")
    table.add_column("middle head", justify="right")
    for one in found:
        table.add_row(
            str(one.head.layer_index), str(one.head.head), Text(one.says), Text(one.middle)
        )
    return table


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text.strip(), style))
    console.print()
