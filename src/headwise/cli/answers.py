"""Answers in a terminal of 80 columns, with colours or without."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from headwise.studies.question import Answer
from headwise.studies.study import Study

INDENT = 2


def show(result: Study, console: Console, *, whole: bool) -> None:
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
        console.print(
            _indented(Text(f"Left out: {left.reason}.\nTo get it: {left.remedy}", "yellow"))
        )
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
        console.print(_indented(_table(answer.question.table.columns, answer, console)))


def _table(columns: Sequence[str], answer: Answer, console: Console) -> Table | Group:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, is_figures in zip(columns, answer.are_figures, strict=True):
        table.add_column(Text(name), justify="right" if is_figures else "left")
    for row in answer.rows:
        table.add_row(*map(Text, row))
    if console.measure(table).minimum <= console.width - 2 * INDENT:
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


def _indented(what: RenderableType) -> Padding:
    return Padding(what, (0, 0, 0, INDENT))
