"""``headwise scan``: what every attention head of a stored model does, from one reading."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headwise.cli.output import INTERRUPTED
from headwise.cli.scan.scan_options import ScanOptions

if TYPE_CHECKING:
    from headwise.reports.scan_page import ScanReport

PAGE = Path("headwise-scan/index.html")


def _split(given: list[str] | None) -> tuple[str, ...] | None:
    """``a,b`` and ``a --stats b`` are the same."""
    if not given:
        return None
    return tuple(name for part in given for name in part.replace(" ", "").split(",") if name)


ModelDir = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL_DIR",
        show_default=False,
        help="A folder with a model of transformers, or weights that headwise converted. "
        "Nothing is downloaded.",
    ),
]
Demo = Annotated[
    bool, typer.Option("--demo", help="Scan the small model that ships with headwise.")
]
Texts = Annotated[
    list[Path] | None,
    typer.Option(help="A text to read; a folder, or several, to read as a corpus."),
]
Tokens = Annotated[Path | None, typer.Option(help="A file of token ids to read.")]
RandomRepeats = Annotated[
    bool,
    typer.Option(
        "--random-repeats", help="Read random tokens twice over: shows induction and copying."
    ),
]
Length = Annotated[
    int | None,
    typer.Option(help="Tokens to read at most.", show_default="what the model takes, to 4,096"),
]
Stats = Annotated[
    list[str] | None,
    typer.Option(
        callback=_split, help="Statistics by name, with commas between.", show_default="all"
    ),
]
Layers = Annotated[
    list[str] | None,
    typer.Option(
        callback=_split, help="Layers by number, or as in '*layer.3.*'.", show_default="all"
    ),
]
Out = Annotated[
    Path | None, typer.Option(help="A folder to keep the scan in; it can be resumed there.")
]
Page = Annotated[Path, typer.Option(help="The HTML page to write.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the code that lies beside the weights.")
]
Force = Annotated[bool, typer.Option("--force", help="Start even if memory will hardly do.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print every number as JSON instead of pictures.")
]


def scan(
    model_dir: ModelDir = None,
    *,
    demo: Demo = False,
    text: Texts = None,
    tokens: Tokens = None,
    random_repeats: RandomRepeats = False,
    length: Length = None,
    stats: Stats = None,
    layers: Layers = None,
    out: Out = None,
    page: Page = PAGE,
    trust_remote_code: TrustRemoteCode = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Let a model read a text, and look at each of its attention heads.

    Prints what stands out, and writes a page with everything. A corpus that was
    interrupted goes on where it was when it is asked for again.
    """
    options = locals()  # by the names that they have in `ScanOptions`, all but one
    del options["as_json"]
    _scan(ScanOptions(**options), as_json=as_json)


def _scan(asked: ScanOptions, *, as_json: bool) -> None:
    import time

    from headwise.cli.output import aside, end

    asked.require_sense()
    start = time.perf_counter()
    report = report_of(asked)
    from rich.console import Console

    from headwise.cli.scan.run_scan import KEPT
    from headwise.reports.scan_page import save
    from headwise.reports.terminal import show_scan

    end(
        save(report, asked.page),
        start=start,
        show=lambda terminal: show_scan(report, terminal),
        as_json=report.as_json if as_json else None,
    )
    if asked.out is not None:
        console = aside() if as_json else Console(highlight=False)
        console.print(KEPT, str(asked.out.absolute()), sep="\n", markup=False, soft_wrap=True)


def report_of(asked: ScanOptions) -> ScanReport:
    """Do the scan; the estimate and how far it is are told beside standard output.

    Raises:
        typer.Exit: with status 130, after a line on what is kept, if the user interrupts.
    """
    from headwise.cli.output import aside
    from headwise.cli.progress_bar import on_a_bar

    console = aside()
    left = "Interrupted before anything was read."
    try:
        with on_a_bar(console, "loading the model"):
            from headwise.cli.scan.run_scan import prepare

            work = prepare(asked)
        console.print(work.begins_with, markup=False)
        with on_a_bar(console, "reading") as progress:
            try:
                return work.run(progress)
            except KeyboardInterrupt:
                left = work.when_interrupted
                raise
    except KeyboardInterrupt:
        console.print(left, markup=False)
        raise typer.Exit(INTERRUPTED) from None
