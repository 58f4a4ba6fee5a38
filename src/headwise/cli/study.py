"""``headwise study``: questions about heads, each answered by an experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.output import NO, UNDECIDED

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
    if as_list:
        _print_list(questions or [])
    else:
        _run_study(questions or [], out, as_json=as_json)


def _run_study(questions: list[str], out: Path, *, as_json: bool) -> None:
    import time

    from headwise.cli.output import print_result, progress_bar, stderr_console
    from headwise.support.files import make_parent_and_require_writable

    start = time.perf_counter()
    with progress_bar(stderr_console(), "loading torch") as progress:
        from headwise.study.page import require_matplotlib, save_study_page
        from headwise.study.run import answer_questions, select_ids

        # Everything that can be refused is refused before the work and before a folder is made.
        select_ids(questions)
        require_matplotlib()
        make_parent_and_require_writable(out)
        result = answer_questions(questions, progress=progress)
        page = save_study_page(result, out)
    from headwise.study.terminal import show_study

    print_result(
        page,
        start=start,
        show=lambda console: show_study(result, console, whole=bool(questions)),
        as_json=result.as_json if as_json else None,
    )
    if not all(answer.holds for answer in result.answers):
        raise typer.Exit(NO)
    if not result.answers:
        raise typer.Exit(UNDECIDED)


def _print_list(questions: list[str]) -> None:
    from headwise.study.question import load_question
    from headwise.study.run import select_ids

    names = select_ids(questions)
    for name in names:
        typer.echo(f"{name:<{max(map(len, names))}}  {load_question(name).asks}")
