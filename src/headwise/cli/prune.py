"""``headwise prune``: heads taken out of a stored model, chosen and measured on a text."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headwise.cli import output
from headwise.support.files import make_parent_and_require_writable, write_whole

if TYPE_CHECKING:
    from headwise.surgery._prune import Pruning
    from headwise.surgery.folders import Written

SCHEMA = 1  # version of the JSON form

Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL", show_default=False, help="A folder from save_pretrained, with a tokenizer."
    ),
]
Data = Annotated[
    Path,
    typer.Option(
        help="A text file, a sequence on each line: the lines in turns to choose and fit on, and "
        "held out.",
        show_default=False,
    ),
]
Out = Annotated[Path, typer.Option(help="A new folder for the smaller model.", show_default=False)]
Keep = Annotated[float, typer.Option(help="The share of heads that stays.")]
By = Annotated[
    Literal["ablation", "gradient"],
    typer.Option(help="How the importance of a head is measured."),
]
Repair = Annotated[
    Literal["mean", "zero", "refit"],
    typer.Option(
        help="What stands in for a head: its mean output, nothing, or an output projection that "
        "is fitted where held-out tokens agree."
    ),
]
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


def prune(
    model: Model,
    *,
    data: Data,
    out: Out,
    keep: Keep = 0.75,
    by: By = "ablation",
    repair: Repair = "mean",
    form: Form = "plain",
    length: Length = 128,
    page: Page = None,
    dry_run: DryRun = False,
    as_json: output.AsJson = False,
) -> None:
    """Take the heads out of a stored model that matter least.

    First the plan with its predicted effect, then the folder, the measurement
    on held-out lines, and a page with the curve. To resume an interrupted run,
    repeat the command: effects of heads that were measured are kept.
    """
    start, console = time.perf_counter(), output.make_console(stderr=True)
    with output.progress_bar(console, "loading torch") as progress:
        from headwise.reports.pictures import require_matplotlib
        from headwise.scanning.source import make_model_title
        from headwise.surgery import stored

        if page is None:
            page = out.with_name(f"{out.name}.html")
        if not dry_run:
            require_matplotlib()
            make_parent_and_require_writable(page)
        opened = stored.open_for_cut(
            model, data, out, form=form, length=length, keep=keep, repair=repair
        )
        options: dict[str, Any] = {"keep": keep, "by": by, "repair": repair}
        plan = opened.plan_prune(**options, progress=progress)
    folder = opened.plan_folder(plan)
    if not as_json:
        output.print_lines([str(plan), str(folder)])
    if dry_run:
        result = {"schema": SCHEMA, "layers": plan.table(), "predicted": -plan.choice.predicted}
        if as_json:
            output.print_lines([], result)
        return
    with output.progress_bar(console, "measuring") as progress:
        pruned = plan.measure(progress)
        written = opened.write(pruned.cut, progress)
        difference = opened.check(pruned.model)
    title = make_model_title(model)
    _report(pruned, written, difference, page=page, title=title, start=start, as_json=as_json)


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


def _report(
    pruned: Pruning,
    written: Written,
    difference: float,
    *,
    page: Path,
    title: str,
    start: float,
    as_json: bool,
) -> None:
    from headwise.reports.surgery import render_pruning
    from headwise.support.text import human_bytes

    lines = lines_that_load(written, type(pruned.model).__name__)
    path = write_whole(page, render_pruning(pruned, model=title, commands=lines))
    checked = f"a new process loads it; its outputs are within {difference:.1e} of those in memory"
    sizes = f"{human_bytes(written.nbytes)} of tensors, {human_bytes(written.nbytes_before)} before"
    result = {"schema": SCHEMA, **pruned.values(), "folder": str(written.folder)}
    result |= {"bytes": written.nbytes, "bytes_before": written.nbytes_before}
    output.print_result(
        path,
        start=start,
        show=lambda console: console.print(
            *pruned.result_lines(),
            f"{written.folder}: {sizes}; {checked}",
            sep="\n",
            markup=False,
            soft_wrap=True,
        ),
        as_json=(lambda: result) if as_json else None,
    )
