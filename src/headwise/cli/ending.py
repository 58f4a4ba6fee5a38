"""How every command ends: what it found, how long it took, and where its pages are."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console


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
