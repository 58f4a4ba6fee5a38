"""Output of every command: result, time and pages, or an error; and the exit status.

0    yes, or done
1    no, as the answer to the question of the command
2    wrong use: an option, a file or a folder that the command cannot use
3    the input does not decide the question
70   a bug in headwise, with its traceback
130  interrupted
"""

from __future__ import annotations

import json
import shlex
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import typer

from headwise.errors import HeadwiseError, UndecidedError, join_error_lines

if TYPE_CHECKING:
    from rich.console import Console

    from headwise.diagnosis.results import Diagnosis

YES, NO, USAGE, UNDECIDED = 0, 1, 2, 3
CRASHED = 70  # EX_SOFTWARE of sysexits.h, since 1 means no
INTERRUPTED = 130  # 128 and the number of the signal that Ctrl-C sends


def suggest_comparison(diagnosis: Diagnosis, first: Path, second: Path) -> str:
    """Return a line with the command that runs a layer of two checkpoints that are not the same.

    It is empty for the same ones, and where a checkpoint lacks tensors or its layout is not known,
    so that no layer may load.
    """
    tensors = diagnosis.tensors
    if exit_status_of_diagnosis(diagnosis) != NO or (
        tensors is not None and (tensors.only_first or tensors.only_second)
    ):
        return ""
    layer = diagnosis.moves[0].layer if diagnosis.moves else 0
    words = ["headwise", "compare", str(first), str(second), "--layer", str(layer)]
    return f"To run both: {shlex.join(words)}"


def exit_status_of_diagnosis(diagnosis: Diagnosis) -> int:
    """Return the exit status of a verdict."""
    from headwise.diagnosis.results import Verdict

    if diagnosis.verdict is Verdict.INCONCLUSIVE:
        return UNDECIDED
    return YES if diagnosis else NO


def exit_status_help(*, yes: str, no: str = "", undecided: str = "") -> str:
    """Return the last lines of a command's help: the meaning of each exit status."""
    usage = "options or input that cannot be used"
    meanings = {YES: yes, NO: no, USAGE: usage, UNDECIDED: undecided}
    return (
        "Exit status: " + "; ".join(f"{n} {words}" for n, words in meanings.items() if words) + "."
    )


def option_text(name: str, values: tuple[str, ...] = ()) -> str:
    """Return an argument as options: ``--kv-heads``, or ``--accept scale --accept mask``."""
    option = f"--{name.replace('_', '-')}"
    return " ".join(f"{option} {value}" for value in values) or option


def exit_status_of_error(error: HeadwiseError) -> int:
    """Return the exit status of an error that has a message."""
    return UNDECIDED if isinstance(error, UndecidedError) else USAGE


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
            raise SystemExit(exit_status_of_error(error)) from None
        if isinstance(error, Exception):
            traceback.print_exception(error)
            raise SystemExit(CRASHED) from None


def created_folder_note(path: Path) -> str:
    """Return a line on the folder of ``path`` if that has to be made, else ""."""
    folder = path.absolute().parent
    return "" if folder.exists() else f"The folder {folder} was not there and was made."


def stderr_console() -> Console:
    """Return a console for progress on standard error, since standard output has the result."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


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

    ``details`` come after the pages, which are then named once more: the last line is what a
    reader of a long text sees.
    """
    from rich.console import Console

    seconds = time.perf_counter() - start
    if as_json is not None:
        typer.echo(json.dumps(as_json(), ensure_ascii=False))
        console = stderr_console()
    else:
        console = Console(highlight=False)
        show(console)
    text = f"The {'page' if len(pages) == 1 else 'pages'}:"
    if pages:
        _print_lines(console, f"{seconds:.1f} s in all. {text}", *map(str, pages))
    if details is not None and as_json is None:
        console.print()
        details(console)
        _print_lines(console, text, *map(str, pages))


def _print_lines(console: Console, *lines: str) -> None:
    console.print(*lines, sep="\n", markup=False, soft_wrap=True)
