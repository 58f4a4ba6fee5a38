"""``headwise regroup``: fewer kv heads in a stored model, fitted and measured on a text."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated, Literal

import typer

from headwise.cli import cut, output

KvHeads = Annotated[
    int,
    typer.Option(
        help="The number of kv heads in each layer, a divisor of the present one.",
        show_default=False,
    ),
]
Merge = Annotated[
    Literal["fitted", "aligned", "mean"],
    typer.Option(
        help="How several kv heads become one: by the maps that lose least; by their mean, after "
        "each is turned towards the others; or by their mean."
    ),
]


def regroup(
    model: cut.Model,
    *,
    kv_heads: KvHeads,
    out: cut.Out,
    data: cut.Data = None,
    merge: Merge = "fitted",
    form: cut.Form = "plain",
    length: cut.Length = 128,
    page: cut.Page = None,
    dry_run: cut.DryRun = False,
    as_json: output.AsJson = False,
) -> None:
    """Make fewer kv heads, which more query heads share.

    First the plan with what each layer loses, then the measurement on held-out
    lines, the folder and its check in a new process, and a page with the curve.
    """
    start, console = time.perf_counter(), output.make_console(stderr=True)
    with output.progress_bar(console, "loading torch") as progress:
        from headwise.reports.surgery import render_regrouping
        from headwise.scanning.source import make_model_title
        from headwise.surgery import stored

        page = cut.prepare_page(page, out, dry_run=dry_run)
        call = f"regroup(model, inputs, {kv_heads=}, {merge=})"
        opened = stored.open_for_cut(model, data, out, form=form, length=length, call=call)
        opened.require_kv_heads(kv_heads)
        plan = opened.plan_regroup(kv_heads=kv_heads, merge=merge, progress=progress)
    folder = opened.plan_folder(plan.cut)
    if not as_json:
        output.print_lines([opened.note, str(plan), str(folder)])
    if dry_run:
        if as_json:
            output.print_lines([], {"schema": cut.SCHEMA, "layers": plan.table()})
        return
    with output.progress_bar(console, "measuring") as progress:
        regrouped = plan.measure(progress)
        written = opened.write(regrouped.cut, progress)
        difference = opened.check(regrouped.model)
    render = partial(render_regrouping, regrouped, make_model_title(model))
    cut.report(
        regrouped, written, difference, page=page, render=render, start=start, as_json=as_json
    )
