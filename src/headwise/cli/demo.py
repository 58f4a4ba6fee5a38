"""``headwise demo``: two models are scanned while they read, and the trained one is compared."""

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
BESIDE = "scan.html"


def demo(
    out: Annotated[
        Path, typer.Option(help=f"The main HTML page; the scan's is {BESIDE} beside it.")
    ] = PAGE,
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every number as JSON instead of pictures.")
    ] = False,
) -> None:
    """Look at each attention head of two models, while they read.

    First the small model that ships, as in headwise scan --demo. Then a trained
    encoder, all-MiniLM-L6-v2: the main page is about it, and says whether headwise's
    layers with its weights are the same function. Where it cannot be had, the scan of
    the small model is all, and its page is the main one.
    """
    import time

    from headwise.cli.output import aside, end
    from headwise.cli.scan.command import report_of
    from headwise.cli.scan.scan_options import ScanOptions
    from headwise.reports.scan_page import save

    beside = _beside(out)
    start = time.perf_counter()
    tiny = report_of(ScanOptions(demo=True, page=beside))
    try:
        trained = _trained(out)
    except MissingExtraError as error:
        trained, missing = None, error
        if as_json:
            _say_missing(missing, aside())
    pages = [save(tiny, beside), save(trained, out)] if trained else [save(tiny, out)]

    def show(console: Console) -> None:
        from headwise.reports.terminal import show_scan

        _head(console, "The small model that ships with headwise")
        show_scan(tiny, console)
        _head(console, "A trained encoder")
        show_scan(trained, console) if trained else _say_missing(missing, console)

    def plain() -> dict[str, Any]:
        return {"scan": tiny.as_json(), "encoder": trained.as_json() if trained else None}

    end(*pages, start=start, show=show, as_json=plain if as_json else None)
    if trained and not (trained.same_function and trained.same_function.holds):
        raise typer.Exit(NO)


def _beside(page: Path) -> Path:
    """Where the scan's page goes if it is not the main one; refused before any work."""
    from headwise.support.atomic_write import require_writable

    if page.name.casefold() == BESIDE:
        raise OptionError(
            saw=f"{page}, where the page of the scan goes",
            needed="another name: there are two pages",
            do=f"--out {page.with_name(PAGE.name)}",
        )
    return require_writable(page).with_name(BESIDE)


def _trained(page: Path) -> ScanReport:
    """The scan of the trained encoder, and whether headwise's layers are the same function.

    Raises:
        MissingExtraError: the encoder, or transformers, is not installed.
    """
    from headwise.bundled_models import minilm
    from headwise.cli.output import aside
    from headwise.cli.progress_bar import on_a_bar
    from headwise.cli.scan.command import report_of
    from headwise.cli.scan.scan_options import ScanOptions
    from headwise.study import trained_encoder
    from headwise.study.experiments.same_weights import same_function

    with on_a_bar(aside(), "loading the trained encoder") as progress:
        reading = trained_encoder.trained(progress)
        same = same_function(reading)
    report = report_of(ScanOptions(model_dir=minilm.folder(), page=page))
    return replace(report, title=reading.model, same_function=same)


def _head(console: Console, words: str) -> None:
    console.rule(words, align="left", style="dim")
    console.print()


def _say_missing(missing: MissingExtraError, console: Console) -> None:
    """In two lines: why, and the command that gets it."""
    console.print(f"No all-MiniLM-L6-v2: {missing.saw}. To get it:", markup=False)
    console.print(missing.do, markup=False, soft_wrap=True)
    console.print()
