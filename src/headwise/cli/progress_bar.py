"""Progress bar of the commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress_bar(console: Console, first: str) -> Iterator[Callable[[str, int, int], None]]:
    """Draw a bar while the block runs, and yield its callback (stage, steps done, total)."""
    columns = (TextColumn("{task.description:<26}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(first, total=None)

        def report(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total)

        yield report
