"""The command ``headwise scan`` with its options."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headwise.cli.output import INTERRUPTED
from headwise.cli.processes import TIMEOUT, Processes, Timeout, rank_count
from headwise.cli.scan.options import ScanOptions

if TYPE_CHECKING:
    from headwise.reports.report import ScanReport
    from headwise.sharding.processes.job import Job

PAGE = Path("headwise-scan/index.html")


def _split_names(values: list[str] | None) -> tuple[str, ...] | None:
    """Split names at commas, so that ``a,b`` and ``a --stats b`` are the same."""
    if not values:
        return None
    return tuple(name for part in values for name in part.replace(" ", "").split(",") if name)


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
    typer.Option(help="A text file to read; several files or a folder are read as a corpus."),
]
Tokens = Annotated[Path | None, typer.Option(help="A file of token ids to read.")]
RandomRepeats = Annotated[
    bool,
    typer.Option(
        "--random-repeats", help="Read random tokens twice, to show induction and copying."
    ),
]
Length = Annotated[
    int | None,
    typer.Option(help="Most tokens to read.", show_default="those of the model, up to 4,096"),
]
Stats = Annotated[
    list[str] | None,
    typer.Option(
        callback=_split_names, help="Statistics by name, separated by commas.", show_default="all"
    ),
]
Layers = Annotated[
    list[str] | None,
    typer.Option(
        callback=_split_names, help="Layers by number or pattern: '*layer.3.*'.", show_default="all"
    ),
]
TopKeys = Annotated[
    list[str] | None,
    typer.Option(
        callback=_split_names,
        help="Heads of which the page shows single tokens: 3.7,4.0 (layer.head), all or none.",
        show_default="all, if they are few and the text is short",
    ),
]
MapCells = Annotated[
    int | None,
    typer.Option(help="Blocks of a map on each side.", show_default="128"),
]
Out = Annotated[
    Path | None, typer.Option(help="A folder for the scan, in which a run can be resumed.")
]
Page = Annotated[Path, typer.Option(help="The HTML page to write.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the code in the folder of the weights.")
]
SkipEmpty = Annotated[
    bool, typer.Option("--skip-empty", help="Leave out texts of fewer than two tokens.")
]
Device = Annotated[str, typer.Option(help="Where the model runs: cpu, cuda or cuda:1.")]
DType = Annotated[
    str | None,
    typer.Option(
        help="Run the model in float64, float32, bfloat16 or float16.",
        show_default="as its weights are stored",
    ),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Write over an earlier page, and skip the memory check."),
]
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
    skip_empty: SkipEmpty = False,
    device: Device = "cpu",
    dtype: DType = None,
    top_keys: TopKeys = None,
    map_cells: MapCells = None,
    out: Out = None,
    page: Page = PAGE,
    trust_remote_code: TrustRemoteCode = False,
    force: Force = False,
    processes: Processes = None,
    timeout: Timeout = TIMEOUT,
    as_json: AsJson = False,
) -> None:
    """Run a model on a text, and show statistics of every attention head.

    Prints the heads that stand out, and writes a page with everything. To resume an
    interrupted corpus, run the same command again. --processes N shares a corpus among
    N processes, and so does torchrun.
    """
    options = locals()  # all but as_json are fields of `ScanOptions`
    del options["as_json"]
    _run_scan_command(ScanOptions(**options), as_json=as_json)


def _run_scan_command(options: ScanOptions, *, as_json: bool) -> None:
    if rank_count() > 1:
        from headwise.cli.processes import CommandJob

        with CommandJob(options.timeout, ends_at_once=True) as job:
            options.require_sense()
            _scan_and_print(options, as_json=as_json, job=job)
        return
    options.require_sense()
    if (options.processes or 1) > 1:
        raise typer.Exit(_launch_scan(options, as_json=as_json))
    _scan_and_print(options, as_json=as_json)


def _launch_scan(options: ScanOptions, *, as_json: bool) -> int:
    """Run the scan in several processes, and return the exit status."""
    from headwise.cli.processes import headwise_command, launch_command
    from headwise.cli.scan.run import describe_interruption
    from headwise.cli.scan.source import list_text_files

    count = len(list_text_files(options.text or ()))
    return launch_command(
        headwise_command("scan", *options.arguments, *(["--json"] if as_json else [])),
        count=options.processes or 1,
        interrupted=lambda: describe_interruption(options.out, count),
    )


def _scan_and_print(options: ScanOptions, *, as_json: bool, job: Job | None = None) -> None:
    """Run the scan; of the ranks of a job, rank 0 prints the result."""
    import time

    from headwise.cli.output import print_result, stderr_console

    start = time.perf_counter()
    report = run_scan_with_progress(options, job)
    if job is not None and job.rank != 0:
        return
    from rich.console import Console

    from headwise.cli.scan.run import KEPT
    from headwise.reports.page import save_scan_page
    from headwise.reports.terminal import print_input_and_standouts, print_statistic_grid

    print_result(
        save_scan_page(options.page, report),
        start=start,
        show=lambda terminal: print_input_and_standouts(report, terminal),
        as_json=report.as_json if as_json else None,
        details=lambda terminal: print_statistic_grid(report, terminal),
    )
    if options.out is not None:
        console = stderr_console() if as_json else Console(highlight=False)
        console.print(KEPT, str(options.out.absolute()), sep="\n", markup=False, soft_wrap=True)


def run_scan_with_progress(options: ScanOptions, job: Job | None = None) -> ScanReport:
    """Run the scan, with the estimate and the progress on standard error.

    Args:
        options: the options of the command.
        job: the job whose ranks share the texts; only rank 0 prints.

    Raises:
        typer.Exit: with status 130, after a line on the saved files, if the user interrupts.
    """
    from headwise.cli.output import stderr_console
    from headwise.cli.progress import progress_bar

    console = stderr_console()
    console.quiet = job is not None and job.rank != 0
    message = "Interrupted before the scan began."
    try:
        with progress_bar(console, "loading the model"):
            from headwise.cli.scan.run import prepare_scan

            work = prepare_scan(options, job)
        console.print(work.opening_lines, markup=False)
        with progress_bar(console, "reading") as progress:
            try:
                return work.run(progress)
            except KeyboardInterrupt:
                message = work.interrupted_message
                raise
    except KeyboardInterrupt:
        console.print(message, markup=False)
        raise typer.Exit(INTERRUPTED) from None
