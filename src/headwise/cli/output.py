"""How every command ends: its result, its time and its pages, or an error; and its exit status.

0    yes, or done
1    no: the question that the command asks has this answer
2    wrong use: an option, a file or a folder that the command cannot work with
3    cannot be decided from what was given
70   a mistake of headwise itself, with its traceback
130  interrupted
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import typer

from headwise.errors import HeadwiseError, UndecidedError, message

if TYPE_CHECKING:
    from rich.console import Console

YES, NO, USAGE, UNDECIDED = 0, 1, 2, 3
CRASHED = 70  # EX_SOFTWARE of sysexits.h: Python's own 1 would be read as a no
INTERRUPTED = 130  # 128 and the number of the signal that Ctrl-C sends


def told(*, yes: str, no: str = "", undecided: str = "") -> str:
    """The last lines of a command's help: what each status means there."""
    meant = {YES: yes, NO: no, USAGE: "options or input that cannot be used", UNDECIDED: undecided}
    return "Exit status: " + "; ".join(f"{n} {words}" for n, words in meant.items() if words) + "."


def as_option(name: str, values: tuple[str, ...] = ()) -> str:
    """Return how a command writes an argument: ``--kv-heads``, ``--accept scale --accept mask``."""
    option = f"--{name.replace('_', '-')}"
    return " ".join(f"{option} {value}" for value in values) or option


class PrintedErrors:
    """Turns an error that leaves the block into its message and its exit status."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, HeadwiseError):
            typer.echo(f"headwise: {message(*error.lines(as_option))}", err=True)
            raise SystemExit(UNDECIDED if isinstance(error, UndecidedError) else USAGE) from None
        if isinstance(error, Exception):
            traceback.print_exception(error)
            raise SystemExit(CRASHED) from None


def folders_to_make(path: Path) -> str:
    """A line that names the folder above ``path`` that is not there yet; "" where it is."""
    folder = path.absolute().parent
    return "" if folder.exists() else f"The folder {folder} was not there and was made."


def aside() -> Console:
    """For progress, which leaves standard output to the result."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def end(
    *pages: Path,
    start: float,
    show: Callable[[Console], None],
    as_json: Callable[[], Any] | None,
) -> None:
    """Print the result for people, or all of it as JSON where ``as_json`` is given."""
    from rich.console import Console

    seconds = time.perf_counter() - start
    if as_json is not None:
        typer.echo(json.dumps(as_json(), ensure_ascii=False))
        console = aside()
    else:
        console = Console(highlight=False)
        show(console)
    what = "page" if len(pages) == 1 else "pages"
    console.print(
        f"{seconds:.1f} s. The {what}:", *map(str, pages), sep="\n", markup=False, soft_wrap=True
    )
