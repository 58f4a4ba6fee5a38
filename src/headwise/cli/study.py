"""``headwise study``: questions about heads, each answered by an experiment."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from headwise.cli import output
from headwise.support.files import make_parent_and_require_writable, write_whole

PAGE = Path("headwise-study/index.html")


def study(
    questions: Annotated[
        list[str] | None,
        typer.Argument(metavar="QUESTION", help="The questions to ask; all if none is named."),
    ] = None,
    *,
    out: Annotated[Path, typer.Option(help="The HTML page to write.")] = PAGE,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every number as JSON instead of sentences.")
    ] = False,
    as_list: Annotated[
        bool, typer.Option("--list", help="Print the questions and their names, and stop.")
    ] = False,
) -> None:
    """Answer questions about attention heads by experiments.

    Prints each question with its verdict. If you name questions, it also prints
    their facts and figures. The page has everything.
    """
    start = time.perf_counter()
    with output.progress_bar(output.make_console(stderr=True), "loading torch") as progress:
        from headwise.reports.pictures import require_matplotlib
        from headwise.study import output as study_output
        from headwise.study import question

        names = question.select_ids(questions or [])
        if not as_list:
            # Everything that can be refused is refused before the work and before a folder is made.
            require_matplotlib()
            make_parent_and_require_writable(out)
            result = question.answer_questions(questions or [], progress=progress)
            path = write_whole(out, study_output.render_study_page(result))
    if as_list:
        for name in names:
            typer.echo(f"{name:<{max(map(len, names))}}  {question.load_question(name).asks}")
        return
    output.print_result(
        path,
        start=start,
        show=lambda console: study_output.show_study(result, console, whole=bool(questions)),
        as_json=result.as_json if as_json else None,
    )
    if not all(answer.holds for answer in result.answers):
        raise typer.Exit(output.NO)
    if not result.answers:
        raise typer.Exit(output.UNDECIDED)
