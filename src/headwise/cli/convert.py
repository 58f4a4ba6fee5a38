"""``headwise convert``: the weights of a stored model in another layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headwise.cli.checkpoints import Counts, Heads, KvHeads, RotaryWidth

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from headwise.layouts.checkpoint.conversion import Converted
    from headwise.layouts.layout import Layout

From = Annotated[
    str | None,
    typer.Option(
        "--from", help="The layout of the source.", show_default="what the files leave possible"
    ),
]
To = Annotated[str, typer.Option("--to", help="The layout to write.", show_default=False)]
Root = Annotated[
    str | None,
    typer.Option(
        help="What stands before all names that are written, as 'model.'.",
        show_default="that of the source",
    ),
]
Accept = Annotated[
    list[str] | None,
    typer.Option(metavar="FIELD", help="What the reader of the result will be told, as scale."),
]


def convert(
    source: Annotated[
        Path, typer.Argument(show_default=False, help="A file of weights, or a folder with them.")
    ],
    target: Annotated[
        Path, typer.Argument(show_default=False, help="A name that is free; nothing is replaced.")
    ],
    *,
    to: To,
    from_: From = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    rotary_width: RotaryWidth = None,
    root: Root = None,
    accept: Accept = None,
) -> None:
    """Store the weights of a model in another layout, without loss.

    Every tensor that is rewritten is moved back and compared byte for byte.
    A run that was interrupted goes on where it was when it is asked for again.
    """
    given = {"heads": heads, "kv_heads": kv_heads, "rotary_width": rotary_width}
    _convert(source, target, (from_, to), given, root=root, accept=tuple(accept or ()))


def _convert(
    place: Path,
    target: Path,
    named: tuple[str | None, str],
    given: Counts,
    *,
    root: str | None,
    accept: tuple[str, ...],
) -> None:
    import time

    from headwise.cli.ending import aside
    from headwise.cli.progress import on_a_bar

    start = time.perf_counter()
    with on_a_bar(aside(), "loading torch"):
        from rich.console import Console

        from headwise.cli.checkpoints import opened
        from headwise.layouts.checkpoint.conversion import convert_checkpoint
        from headwise.layouts.checkpoint.working import folder_of
        from headwise.layouts.registry import layout
        from headwise.models.threads import one_thread

        wanted = layout(named[1])
        found = opened(place, given)
        stored = found.detection().require() if named[0] is None else layout(named[0])
    console = aside()
    console.print(f"{place}: {stored.name} -> {wanted.name}", markup=False)
    try:
        # Moving bytes waits for memory and the disk: a second thread takes twice the time.
        with one_thread(), _bytes_on_a_bar(console) as progress:
            done = convert_checkpoint(
                found.source,
                target,
                stored,
                wanted,
                accept=accept,
                root=root,
                progress=progress,
                **found.known,
            )
    except KeyboardInterrupt:
        begun = f"{folder_of(target)} holds what is done; asked again, it goes on from there."
        console.print(begun, markup=False)
        raise
    _show(done, stored, Console(highlight=False, soft_wrap=True), time.perf_counter() - start)


@contextmanager
def _bytes_on_a_bar(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """A callback (file, bytes done, bytes in all), drawn while the block runs."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def report(file: str, done: int, total: int) -> None:
            bar.update(task, description=file[-40:], completed=done, total=total)

        yield report


def _show(done: Converted, stored: Layout, console: Console, seconds: float) -> None:
    lines = []
    if done.found == "its beginning":
        lines.append("An earlier run had begun it; what it had done was kept.")
    if done.found == "other work":
        lines.append("An earlier run had begun with other files or counts; this one started anew.")
    lines.append(
        f"{done.tensors} tensors: {done.rewritten} rewritten, moved back and compared byte for "
        f"byte; {done.tensors - done.rewritten} copied."
    )
    if done.left:
        shown = ", ".join(done.left[:3])
        more = f" and {len(done.left) - 3} more" if len(done.left) > 3 else ""
        lines.append(f"Not copied, since they go with {stored.name}: {shown}{more}.")
    lines.append(f"{seconds:.1f} s, {done.nbytes / 1e9:.2f} GB. The weights:")
    for line in [*lines, str(done.target)]:
        console.print(line, markup=False)
