"""``headwise demo``: scans of two models, and a comparison of layers for the trained one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headwise.cli import output
from headwise.cli.scan import ScanOptions, run_scan_with_progress
from headwise.errors import MissingExtraError
from headwise.support.files import make_parent_and_require_writable

if TYPE_CHECKING:
    from headwise.reports.report import ScanReport

PAGE = Path("headwise-demo/index.html")
SMALL, TRAINED = "The small model that ships with headwise", "A trained encoder"


def demo(
    out: Annotated[Path, typer.Option(help="The HTML page to write, of both models.")] = PAGE,
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every number as JSON instead of pictures.")
    ] = False,
) -> None:
    """Scan every attention head of two models.

    The first is the small model that ships with headwise, as in headwise scan --demo.
    The second is a trained encoder, all-MiniLM-L6-v2. The page shows both, and also
    whether headwise's layers with the encoder's weights are the same function. If the
    encoder is not installed, the page shows the small model.
    """
    make_parent_and_require_writable(out)
    start = time.perf_counter()
    tiny = run_scan_with_progress(ScanOptions(demo=True, page=out))
    trained, missing = _scan_and_compare_encoder(out)
    if missing and as_json:
        _print_missing_encoder(missing, output.make_console(stderr=True))
    from headwise.reports import page, terminal

    reports = [trained, tiny] if trained else [tiny]

    def show(console: output.Console, part: Callable[[ScanReport, output.Console], None]) -> None:
        for report in reversed(reports):
            console.rule(SMALL if report is tiny else TRAINED, align="left", style="dim")
            console.print()
            part(report, console)

    def show_conclusions(console: output.Console) -> None:
        show(console, terminal.print_input_and_standouts)
        if missing:
            console.rule(TRAINED, align="left", style="dim")
            console.print()
            _print_missing_encoder(missing, console)

    result = {"scan": tiny.as_json(), "encoder": trained and trained.as_json()}
    output.print_result(
        page.save_scan_page(out, *reports),
        start=start,
        show=show_conclusions,
        as_json=(lambda: result) if as_json else None,
        details=lambda console: show(console, terminal.print_statistic_grid),
    )
    if trained and not (trained.same_function and trained.same_function.holds):
        raise typer.Exit(output.NO)


def _scan_and_compare_encoder(page: Path) -> tuple[ScanReport | None, MissingExtraError | None]:
    from headwise.models import minilm
    from headwise.study import encoder
    from headwise.study.questions.implementations import compare_with_model_layers

    try:
        console = output.make_console(stderr=True)
        with output.progress_bar(console, "loading the trained encoder") as progress:
            recorded = encoder.run_minilm(progress=progress)
            same = compare_with_model_layers(recorded)
        report = run_scan_with_progress(ScanOptions(model_dir=minilm.model_folder(), page=page))
    except MissingExtraError as missing:
        return None, missing
    return replace(report, title=recorded.model, same_function=same), None


def _print_missing_encoder(missing: MissingExtraError, console: output.Console) -> None:
    console.print(f"No all-MiniLM-L6-v2: {missing.saw}. To get it:", markup=False)
    console.print(missing.do, markup=False, soft_wrap=True)
    console.print()
