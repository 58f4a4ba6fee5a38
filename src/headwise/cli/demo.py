"""``headwise demo``: two models read, and every head of theirs in pictures and on pages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli.exit_status import NO
from headwise.errors import MissingExtraError, OptionError

if TYPE_CHECKING:
    from rich.console import Console

    from headwise.reports.scan import ScanReport
    from headwise.studies.first_look import FirstLook

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
    encoder, all-MiniLM-L6-v2: the main page is about it. Where it cannot be had,
    the scan is all, and its page is the main one.
    """
    import time

    from headwise.cli.ending import aside, end
    from headwise.cli.scan.asked import Asked
    from headwise.cli.scan.command import report_of

    beside = _beside(out)
    start = time.perf_counter()
    report = report_of(Asked(demo=True, page=beside))
    look = _look()
    pages = _save(report, look, page=out, beside=beside)
    if as_json and isinstance(look, MissingExtraError):
        _say_missing(look, aside())
    end(
        *pages,
        start=start,
        show=lambda console: _show(report, look, console),
        as_json=(lambda: _plain(report, look)) if as_json else None,
    )
    if not isinstance(look, MissingExtraError) and not look.equal:
        raise typer.Exit(NO)


def _beside(page: Path) -> Path:
    """Where the scan's page goes if it is not the main one; refused before any work."""
    from headwise.support.whole_files import require_writable

    if page.name.casefold() == BESIDE:
        raise OptionError(
            saw=f"{page}, where the page of the scan goes",
            needed="another name: there are two pages",
            do=f"--out {page.with_name(PAGE.name)}",
        )
    return require_writable(page).with_name(BESIDE)


def _look() -> FirstLook | MissingExtraError:
    """What the trained encoder's heads do, or what it lacks here."""
    from headwise.cli.ending import aside
    from headwise.cli.progress import on_a_bar
    from headwise.studies.first_look import first_look

    try:
        with on_a_bar(aside(), "loading the trained encoder") as progress:
            return first_look(progress=progress)
    except MissingExtraError as missing:
        return missing


def _save(
    report: ScanReport, look: FirstLook | MissingExtraError, *, page: Path, beside: Path
) -> list[Path]:
    """Write the pages; the main one is the last."""
    from headwise.reports import first_look, scan

    if isinstance(look, MissingExtraError):
        return [scan.save(report, page)]
    return [scan.save(report, beside), first_look.save(look, page)]


def _plain(report: ScanReport, look: FirstLook | MissingExtraError) -> dict[str, Any]:
    """Every number; ``first_look`` is None where there was no trained encoder."""
    found = None if isinstance(look, MissingExtraError) else look.as_json()
    return {"scan": report.as_json(), "first_look": found}


def _show(report: ScanReport, look: FirstLook | MissingExtraError, console: Console) -> None:
    from headwise.cli import first_look
    from headwise.cli.scan import heads

    _head(console, "The small model that ships with headwise")
    heads.show(report, console)
    _head(console, "A trained encoder")
    if isinstance(look, MissingExtraError):
        _say_missing(look, console)
    else:
        first_look.show(look, console)


def _head(console: Console, words: str) -> None:
    console.rule(words, align="left", style="dim")
    console.print()


def _say_missing(missing: MissingExtraError, console: Console) -> None:
    """In two lines: why, and the command that gets it."""
    console.print(f"No all-MiniLM-L6-v2: {missing.saw}. To get it:", markup=False)
    console.print(missing.do, markup=False, soft_wrap=True)
    console.print()
