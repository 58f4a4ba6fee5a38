"""``headwise demo``: a trained encoder reads a text; every head, as a table and as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PAGE = Path("headwise-demo/index.html")


def demo(
    out: Annotated[Path, typer.Option(help="The HTML page to write.")] = PAGE,
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole result as JSON instead of tables.")
    ] = False,
) -> None:
    """Let a trained encoder read a text, and look at each of its attention heads.

    The encoder is all-MiniLM-L6-v2, or a small one trained on the spot where that cannot be had.
    """
    import json
    import time

    from rich.console import Console

    from headwise.cli.progress import on_a_bar
    from headwise.pages.files import require_writable

    require_writable(out)  # before the work, not after it
    start = time.perf_counter()
    # Progress leaves standard output to the result.
    aside = Console(stderr=True, highlight=False, soft_wrap=True)
    with on_a_bar(aside, "loading torch") as progress:
        from headwise.pages.first_look import save
        from headwise.studies.first_look import first_look

        result = first_look(progress=progress)
        page = save(result, out)
    seconds = time.perf_counter() - start
    if as_json:
        typer.echo(json.dumps(result.as_json(), ensure_ascii=False))
        aside.print(f"{seconds:.1f} s. The page: {page}", markup=False)
        return
    from headwise.cli.first_look import show

    console = Console(highlight=False)
    show(result, console)
    console.print(f"{seconds:.1f} s. The page:\n{page}", markup=False, soft_wrap=True)
