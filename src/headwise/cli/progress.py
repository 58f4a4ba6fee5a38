"""Progress bar of the commands."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

Report = Callable[[str, int, int], None]
SECONDS = 10  # between two lines where no bar can be drawn


@contextmanager
def progress_bar(console: Console, first: str) -> Iterator[Report]:
    """Draw a bar while the block runs, and yield its callback (stage, steps done, total).

    Where the console is no terminal, such as a file or a log, print plain lines in its place.
    """
    if not console.is_terminal:
        yield print_progress(console)
        return
    columns = (TextColumn("{task.description:<26}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(first, total=None)

        def report(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total)

        yield report


def print_progress(console: Console) -> Report:
    """Return a callback that prints a line now and then: short work prints none."""
    printed = time.monotonic()

    def report(stage: str, done: int, total: int) -> None:
        nonlocal printed
        if time.monotonic() - printed >= SECONDS:
            printed = time.monotonic()
            console.print(f"{stage}: {done:,} of {total:,}", markup=False)

    return report
