"""Options and the report of commands that cut the heads of a stored model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headwise.cli import output
from headwise.errors import CheckpointError
from headwise.support.files import make_parent_and_require_writable, write_whole

if TYPE_CHECKING:
    from headwise.surgery._prune import Pruning
    from headwise.surgery._regroup import Regrouping
    from headwise.surgery.folders import Written

SCHEMA = 1  # version of the JSON form

Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL", show_default=False, help="A folder from save_pretrained, with a tokenizer."
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        help="A text file, a sequence on each line: the lines in turns to fit on, and held out.",
        show_default="400 English sentences that ship with headwise",
    ),
]
Out = Annotated[Path, typer.Option(help="A new folder for the smaller model.", show_default=False)]
Form = Annotated[
    Literal["plain", "full", "headwise"],
    typer.Option(
        help="What loads the folder: plain transformers, and so with the same number of heads in "
        "each layer; plain transformers at full size, with zeros; or headwise.surgery.load."
    ),
]
Length = Annotated[int, typer.Option(min=2, help="Most tokens of a line.")]
Page = Annotated[Path | None, typer.Option(help="The HTML page to write.", show_default="OUT.html")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the plan and stop; nothing is written.")
]


def prepare_page(page: Path | None, out: Path, *, dry_run: bool) -> Path:
    """Return the path of the page; raise where it could not be written in the end."""
    from headwise.reports.pictures import require_matplotlib

    if page is None:
        page = out.with_name(f"{out.name}.html")
    if not dry_run:
        require_matplotlib()
        if page.exists():
            raise CheckpointError(
                saw=f"{page} exists already",
                needed="a new file, so that no page is lost",
                do="name another one with --page, or remove this one",
            )
        make_parent_and_require_writable(page)
    return page


def lines_that_load(written: Written, kind: str) -> list[str]:
    """Return the Python that loads a folder with a model of a class of transformers."""
    if written.form == "headwise":
        return [
            "import headwise.surgery",
            f"model = headwise.surgery.load({str(written.folder)!r})",
        ]
    return [
        f"from transformers import {kind}",
        f"model = {kind}.from_pretrained({str(written.folder)!r})",
    ]


def report(
    result: Pruning | Regrouping,
    written: Written,
    difference: float,
    *,
    page: Path,
    render: Callable[[Sequence[str]], str],
    start: float,
    as_json: bool,
) -> None:
    """Write the page, and print what was measured.

    Args:
        result: what was measured.
        written: the folder.
        difference: the largest of its outputs to those in memory.
        page: the path of the page.
        render: (lines that load the folder) -> the page as HTML.
        start: when the command began.
        as_json: True for JSON in place of text.
    """
    from headwise.support.text import human_bytes

    path = write_whole(page, render(lines_that_load(written, type(result.model).__name__)))
    checked = f"a new process loads it; its outputs are within {difference:.1e} of those in memory"
    sizes = f"{human_bytes(written.nbytes)} of tensors, {human_bytes(written.nbytes_before)} before"
    values: dict[str, Any] = {"schema": SCHEMA, **result.values(), "folder": str(written.folder)}
    values |= {"bytes": written.nbytes, "bytes_before": written.nbytes_before}
    output.print_result(
        path,
        start=start,
        show=lambda console: console.print(
            *result.result_lines(),
            f"{written.folder}: {sizes}; {checked}",
            sep="\n",
            markup=False,
            soft_wrap=True,
        ),
        as_json=(lambda: values) if as_json else None,
    )
