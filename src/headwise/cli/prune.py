"""``headwise prune``: heads taken out of a stored model, chosen and measured on a text."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated, Any, Literal

import typer

from headwise.cli import cut, output

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
    dry_run: cut.DryRun = False,
    as_json: output.AsJson = False,
) -> None:
    """Take the heads out of a stored model that matter least.

    First the plan with its predicted effect, then the folder, the measurement
    on held-out lines, and a page with the curve. To resume an interrupted run,
    repeat the command: effects of heads that were measured are kept.
    """
    start, console = time.perf_counter(), output.make_console(stderr=True)
    with output.progress_bar(console, "loading torch") as progress:
        from headwise.reports.surgery import render_pruning
        from headwise.scanning.source import make_model_title
        from headwise.surgery import stored

        page = cut.prepare_page(page, out, dry_run=dry_run)
        opened = stored.open_for_cut(model, data, out, form=form, length=length)
        opened.require_keep(keep, repair)
        options: dict[str, Any] = {"keep": keep, "by": by, "repair": repair}
        plan = opened.plan_prune(**options, progress=progress)
    folder = opened.plan_folder(plan.cut)
    if not as_json:
        output.print_lines([str(plan), str(folder)])
    if dry_run:
        result = {"schema": cut.SCHEMA, "layers": plan.table(), "predicted": -plan.choice.predicted}
        if as_json:
            output.print_lines([], result)
        return
    with output.progress_bar(console, "measuring") as progress:
        pruned = plan.measure(progress)
        written = opened.write(pruned.cut, progress)
        difference = opened.check(pruned.model)
    render = partial(render_pruning, pruned, make_model_title(model))
    cut.report(pruned, written, difference, page=page, render=render, start=start, as_json=as_json)
