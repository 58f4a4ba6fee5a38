"""``headwise prune``: heads taken out of a stored model, chosen and measured on a text."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headwise.cli import cut, output

if TYPE_CHECKING:
    from headwise.surgery._prune import PruningPlan

Keep = Annotated[float, typer.Option(help="The share of heads that stays.")]
By = Annotated[
    Literal["ablation", "gradient"], typer.Option(help="How the importance of a head is measured.")
]
Repair = Annotated[
    Literal["mean", "zero", "refit"],
    typer.Option(
        help="What stands in for a head: its mean output, nothing, or an output projection that "
        "is fitted where held-out tokens agree."
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Print the plan and stop. Nothing is written but a hidden file of effects beside OUT, "
        "so that the run itself need not measure them again.",
    ),
]


def prune(
    model: cut.Model,
    *,
    data: cut.Data = None,
    out: cut.Out,
    keep: Keep = 0.75,
    by: By = "ablation",
    repair: Repair = "mean",
    form: cut.Form = "plain",
    length: cut.Length = 128,
    page: cut.Page = None,
    dry_run: DryRun = False,
    as_json: output.AsJson = False,
) -> None:
    """Take the heads out of a stored model that matter least.

    First the plan with its predicted effect, then the measurement on held-out
    lines, the folder and its check in a new process, and a page with the curve.
    To resume an interrupted run, repeat the command: a hidden file beside OUT
    keeps the effects of layers all of whose heads were measured.
    """
    start, console = time.perf_counter(), output.make_console(stderr=True)
    with output.progress_bar(console, "loading torch") as progress:
        from headwise.reports.surgery import render_pruning
        from headwise.scanning.source import make_model_title
        from headwise.surgery import stored

        page = cut.prepare_page(page, out, dry_run=dry_run)
        call = f"prune(model, inputs, {keep=}, {by=}, {repair=}, even={form == 'plain'})"
        opened = stored.open_for_cut(model, data, out, form=form, length=length, call=call)
        opened.require_keep(keep, repair)
        options: dict[str, Any] = {"keep": keep, "by": by, "repair": repair}
        with _saying_how_to_resume(opened.journal):
            plan = opened.plan_prune(**options, progress=progress)
    folder = opened.plan_folder(plan.cut)
    if not as_json:
        output.print_lines([opened.note, str(plan), str(folder)])
    if dry_run:
        _report_plan(plan, opened.journal, as_json=as_json)
        return
    with output.progress_bar(console, "measuring") as progress:
        pruned = plan.measure(progress)
        written = opened.write(pruned.cut, progress)
        difference = opened.check(pruned.model)
    render = partial(render_pruning, pruned, make_model_title(model))
    cut.report(pruned, written, difference, page=page, render=render, start=start, as_json=as_json)


@contextmanager
def _saying_how_to_resume(journal: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        kept = f"effects of whole layers are in {journal}" if journal.is_file() else "nothing kept"
        output.make_console(stderr=True).print(
            f"interrupted; {kept}; to go on, repeat the command", markup=False, soft_wrap=True
        )
        raise


def _report_plan(plan: PruningPlan, journal: Path, *, as_json: bool) -> None:
    kept = str(journal) if journal.is_file() else None  # gradients are not kept
    effects = f"Nothing is written but the effects of heads, in {kept}, which the run itself reads."
    values = {
        "schema": cut.SCHEMA,
        "layers": plan.table(),
        "predicted": -plan.choice.predicted,
        "journal": kept,
    }
    output.print_lines([effects] if kept else [], values if as_json else None)
