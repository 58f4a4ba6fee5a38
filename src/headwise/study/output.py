"""Page and terminal output of a study: questions, verdicts, facts, and pictures on the page.

The pictures are SVG and take their colours from the page. The terminal has 80 columns, and colours
or none.
"""

from __future__ import annotations

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from headwise.reports.pictures import draw_svg
from headwise.reports.templates import secure_page, template_environment
from headwise.reports.terminal import GAP, indent_content, make_table
from headwise.study.question import Answer, Study

HEIGHT = 3.4  # inches, of 72 px; a picture may ask for another


def render_study_page(result: Study) -> str:
    pictures = {answer.question.id: answer_svg(answer) for answer in result.answers}
    template = template_environment().get_template("study.html")
    page = template.render(study=result, pictures=pictures, version=result.setting["headwise"])
    return secure_page(page)


def answer_svg(answer: Answer) -> str:
    """Return the picture as an ``svg`` element; its caption is the label for screen readers."""
    question, caption = answer.question, answer.fill(answer.question.caption)
    return draw_svg(
        lambda figure: question.draw(figure, answer.numbers),
        caption,
        name=question.id,
        height=HEIGHT,
    )


def show_study(result: Study, console: Console, *, whole: bool) -> None:
    if result.fallback:
        console.print(f"Not the trained encoder: {result.fallback.saw}.", style="yellow")
        console.print(f"To get it: {result.fallback.do}\n", markup=False, soft_wrap=True)
    for answer in result.answers:
        console.print(Text(answer.question.asks, "bold"))
        console.print(indent_content(Text(answer.verdict, "" if answer.holds else "bold red")))
        if whole:
            _show_evidence(answer, console)
        console.print()
    for question, missing in result.left_out:
        console.print(Text(question.asks, "bold"))
        message = f"Left out: {missing.saw}.\nTo get it: {missing.do}"
        console.print(indent_content(Text(message, "yellow")))
        console.print()
    confirmed = sum(answer.holds for answer in result.answers)
    console.print(f"{confirmed} of {len(result.answers)} claims are borne out.")
    if not whole:
        example = result.answers[0].question.id if result.answers else "parameters"
        console.print(
            "For the facts and figures of one question, run for instance:\n"
            f"headwise study {example}"
        )


def _show_evidence(answer: Answer, console: Console) -> None:
    console.print(indent_content(Text(answer.fill(answer.question.why), "dim")))
    for holds, sentence in answer.facts:
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_row(Text("✓", "green") if holds else Text("✗", "red"), Text(sentence))
        console.print(indent_content(grid))
    if answer.rows:
        console.print(indent_content(_answer_table(answer, console)))


def _answer_table(answer: Answer, console: Console) -> Table | Group:
    table = make_table(answer.columns)
    for row in answer.rows:
        table.add_row(*map(Text, row))
    if console.measure(table).minimum <= console.width - 2 * GAP:
        return table
    # Too many columns for this terminal: list each cell beside the name of its column.
    lists = []
    for row in answer.rows:
        lists.append(record := Table.grid(padding=(0, 2, 0, 0)))
        record.add_row("", "")
        for count, ((title, _), cell) in enumerate(zip(answer.columns, row, strict=True)):
            record.add_row(Text(title, "dim"), Text(cell, "" if count else "bold"))
    return Group(*lists)
