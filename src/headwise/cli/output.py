"""Output of every command: result, time and pages, or an error; and the exit status.

0    yes, or done
1    no, as the answer to the question of the command
2    wrong use: an option, a file or a folder that the command cannot use
3    the input does not decide the question
70   a bug in headwise, with its traceback
130  interrupted
"""

from __future__ import annotations

import inspect
import json
import shlex
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.errors import HeadwiseError, UndecidedError, join_error_lines

if TYPE_CHECKING:
    from rich.console import Console as Console

    from headwise.identify.results import Diagnosis as Diagnosis
    from headwise.support.progress import Progress as Progress

YES, NO, USAGE, UNDECIDED = 0, 1, 2, 3
SECONDS = 10.0  # between two lines of progress where no bar can be drawn
CRASHED = 70  # EX_SOFTWARE of sysexits.h, since 1 means no
INTERRUPTED = 130  # 128 and the number of the signal that Ctrl-C sends

Weights = Annotated[
    Path, typer.Argument(show_default=False, help="A file of weights, or a folder with them.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code in the folder of a model.")
]
Counts = dict[str, Any]  # int, or None without the option
COUNTS = {
    "heads": "Query heads.",
    "kv_heads": "Heads of keys and values.",
    "head_dim": "Channels of a head, in place of heads.",
    "rotary_width": "Rotated channels of a head.",
}


def takes_counts(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with an option for each of `COUNTS` in the place of its ``counts``."""
    stated = inspect.signature(command, eval_str=True).parameters.values()
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                int | None, typer.Option(help=help_, show_default="from the weights or config.json")
            ],
        )
        for name, help_ in COUNTS.items()
    ]
    shown = [each for p in stated for each in (options if p.name == "counts" else [p])]

    @wraps(command)
    def run(**given: Any) -> None:
        counts = {name: given.pop(name) for name in COUNTS}
        command(**given, counts=counts)

    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    return run


def suggest_comparison(diagnosis: Diagnosis, first: Path, second: Path) -> list[str]:
    """Return a line with the command that runs a layer of two checkpoints that are not the same.

    There is none for the same ones, and where a checkpoint lacks tensors or its layout is not
    known, so that no layer may load.
    """
    tensors = diagnosis.tensors
    if exit_status_of_diagnosis(diagnosis) != NO or (
        tensors is not None and (tensors.only_first or tensors.only_second)
    ):
        return []
    layer = diagnosis.moves[0].layer if diagnosis.moves else 0
    words = ["headwise", "compare", str(first), str(second), "--layer", str(layer)]
    return [f"To run both: {shlex.join(words)}"]


def exit_status_of_diagnosis(diagnosis: Diagnosis) -> int:
    """Return the exit status of a verdict."""
    from headwise.diagnosis.watch import INTERRUPTED as STOPPED
    from headwise.identify.results import Verdict

    if diagnosis.function is not None and diagnosis.function.stopped == STOPPED:
        return INTERRUPTED
    if diagnosis.verdict is Verdict.INCONCLUSIVE:
        return UNDECIDED
    return YES if diagnosis else NO


def exit_status_help(*, yes: str, no: str = "", undecided: str = "") -> str:
    """Return the last lines of a command's help: the meaning of each exit status."""
    usage = "options or input that cannot be used"
    meanings = {YES: yes, NO: no, USAGE: usage, UNDECIDED: undecided}
    words = "; ".join(f"{number} {meaning}" for number, meaning in meanings.items() if meaning)
    return f"Exit status: {words}."


def option_text(name: str, values: tuple[str, ...] = ()) -> str:
    """Return an argument as options: ``--kv-heads``, or ``--accept scale --accept mask``."""
    option = f"--{name.replace('_', '-')}"
    return " ".join(f"{option} {value}" for value in values) or option


def print_error(text: str) -> None:
    """Print the message of an error on standard error."""
    typer.echo(f"headwise: {text}", err=True)


class PrintedErrors:
    """Context that turns an error into its message and exit status."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, HeadwiseError):
            print_error(join_error_lines(*error.lines(option_text)))
            status = UNDECIDED if isinstance(error, UndecidedError) else USAGE
            raise SystemExit(status) from None
        if isinstance(error, Exception):
            traceback.print_exception(error)
            raise SystemExit(CRASHED) from None


def created_folder_note(path: Path) -> str:
    """Return a line on the folder of ``path`` if that has to be made, else ""."""
    folder = path.absolute().parent
    return "" if folder.exists() else f"The folder {folder} was not there and was made."


def make_console(*, stderr: bool = False) -> Console:
    """Return a console for the result, or for progress on standard error."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=stderr)


def print_lines(lines: list[str], result: dict[str, Any] | None = None) -> None:
    """Print lines, or a result as JSON in their place."""
    if result is not None:
        typer.echo(json.dumps(result, ensure_ascii=False))
        return
    for line in lines:
        typer.echo(line)


def print_result(
    *pages: Path,
    start: float,
    show: Callable[[Console], None],
    as_json: Callable[[], Any] | None,
    details: Callable[[Console], None] | None = None,
) -> None:
    """Print the result with ``show``, or as JSON if ``as_json`` is not None, and name the pages.

    The pages are named last: the last line is what a reader of a long text sees.
    """
    seconds, console = time.perf_counter() - start, make_console(stderr=as_json is not None)
    if as_json is not None:
        typer.echo(json.dumps(as_json(), ensure_ascii=False))
    else:
        show(console)
        if details is not None:
            details(console)
    if pages:
        named = "page" if len(pages) == 1 else "pages"
        _print_lines(console, f"{seconds:.1f} s in all. The {named}:", *map(str, pages))


def _print_lines(console: Console, *lines: str) -> None:
    console.print(*lines, sep="\n", markup=False, soft_wrap=True)


@contextmanager
def progress_bar(console: Console, first: str, *, in_bytes: bool = False) -> Iterator[Progress]:
    """Draw a bar while the block runs, and yield its callback (stage, steps done, total).

    Where the console is no terminal, such as a file or a log, print plain lines in its place.
    """
    if not console.is_terminal:
        yield _line_printer(console)
        return
    from rich import progress

    counted = (
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    columns = (
        progress.TextColumn("{task.description:<26}", markup=False),
        progress.BarColumn(),
        *(counted if in_bytes else (progress.TimeElapsedColumn(),)),
    )
    with progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(first, total=None)

        def report(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage[-40:], completed=done, total=total)

        yield report


def _line_printer(console: Console) -> Progress:
    """Return a callback that prints a line now and then: short work prints none."""
    printed = time.monotonic()

    def report(stage: str, done: int, total: int) -> None:
        nonlocal printed
        if time.monotonic() - printed >= SECONDS:
            printed = time.monotonic()
            console.print(f"{stage}: {done:,} of {total:,}", markup=False)

    return report
