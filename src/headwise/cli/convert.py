"""``headwise convert``: the weights of a stored model in another layout."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headwise.cli.checkpoint_options import NAMES, Counts, HeadDim, Heads, KvHeads, RotaryWidth
from headwise.cli.output import missing_folder_note, stderr_console

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from headwise.checkpoints.stream_conversion import ConversionReport
    from headwise.diagnosis.detect import GivenWeights

SHOWN = 4  # names that were kept
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
As = Annotated[
    Literal["safetensors", "meta"],
    typer.Option(
        "--as",
        help="The files to write: safetensors, or consolidated.00.pth and params.json, as Meta's "
        "code loads them.",
    ),
]
Accept = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FIELD",
        help="Go on although the two layouts use the weights differently in this: scale, rotary "
        "and so on. The model that reads them must be told. Can be given several times.",
    ),
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
    head_dim: HeadDim = None,
    rotary_width: RotaryWidth = None,
    root: Root = None,
    accept: Accept = None,
    as_: As = "safetensors",
) -> None:
    """Store the weights of a model in another layout, without loss.

    Every tensor that is rewritten is moved back and compared byte for byte.
    A run that was interrupted goes on where it was when it is asked for again.
    """
    given = dict(zip(NAMES, (heads, kv_heads, head_dim, rotary_width), strict=True))
    options = {"root": root, "accept": tuple(accept or ()), "files": as_}
    _convert(source, target, (from_, to), given, options)


def _convert(
    place: Path,
    target: Path,
    named: tuple[str | None, str],
    given: Counts,
    options: dict[str, Any],
) -> None:
    from headwise.cli.progress_bar import progress_bar

    start = time.perf_counter()
    with progress_bar(stderr_console(), "loading torch"):
        from rich.console import Console

        from headwise.checkpoints.source import CheckpointSource
        from headwise.checkpoints.staging import folder_of
        from headwise.checkpoints.stream_conversion import convert_checkpoint
        from headwise.diagnosis.detect import weights_of
        from headwise.layouts.registry import layout
        from headwise.support.axes import human_bytes
        from headwise.support.thread_count import one_thread

        wanted = layout(named[1])
        found = weights_of(place, given)
        stored = found.layout(named[0], "from")
        assert isinstance(found.tensors, CheckpointSource)  # it was read from a path
    console, made_folder = stderr_console(), missing_folder_note(target)
    console.print(f"{place}: {stored.name} -> {wanted.name}", markup=False)
    try:  # moving bytes waits for memory and the disk: a second thread takes twice the time
        with one_thread(), _bytes_on_a_bar(console) as progress:
            done = convert_checkpoint(
                found.tensors,
                target,
                stored,
                wanted,
                progress=progress,
                **{**options, **found.known},
            )
    except KeyboardInterrupt:
        begun = f"{folder_of(target)} holds what is done; asked again, it goes on from there."
        console.print(begun, markup=False)
        raise
    took = f"{time.perf_counter() - start:.1f} s, {human_bytes(done.nbytes)}. The weights:"
    lines = _lines(done, found, given, (stored.name, wanted.name))
    for line in filter(None, [*lines, made_folder, took, str(done.target)]):
        Console(highlight=False, soft_wrap=True).print(line, markup=False)


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


def _lines(
    done: ConversionReport, read: GivenWeights, given: Counts, names: tuple[str, str]
) -> Iterator[str]:
    """The answer, for layouts of these names."""
    if done.found == "its beginning":
        yield "An earlier run had begun it; what it had done was kept."
    if done.found == "other work":
        yield "An earlier run had begun with other files or counts; this one started anew."
    yield (
        f"{done.tensors} tensors: {done.rewritten} rewritten, moved back and compared byte for "
        f"byte; {done.tensors - done.rewritten} copied."
    )
    if done.roots:
        yield f"The names begin with {', '.join(map(repr, done.roots))}, which --root can change."
    if done.kept:
        kinds = list(dict.fromkeys(re.sub(r"\d+", "{n}", name) for name in done.kept))
        more = " ..." if len(kinds) > SHOWN else ""
        yield (
            f"Names that were kept, since {names[1]} has no others ({len(done.kept)}): "
            f"{', '.join(kinds[:SHOWN])}{more}"
        )
    if read.known:
        yield f"Read with {', '.join(_counts(read, given))}."
    for name, (mine, theirs) in done.accepted.items():
        yield f"Accepted: {name}, {mine} in {names[0]}, {theirs} in {names[1]}."
    if done.left:
        shown = ", ".join(done.left[:3])
        more = f" and {len(done.left) - 3} more" if len(done.left) > 3 else ""
        fit = (
            f"since they go with {names[0]}" if names[0] != names[1] else "though they fit as well"
        )
        yield f"Not copied, {fit}: {shown}{more}."


def _counts(read: GivenWeights, given: Counts) -> Iterator[str]:
    """The counts by where they were read, such as "heads 6, kv_heads 2 (config.json)"."""
    described = () if read.description is None else read.description.counts
    origins: dict[str, list[str]] = {}
    for name, count in read.known.items():
        file = "metadata" if name in described else "config.json"
        origin = file if given.get(name) is None else "given"
        origins.setdefault(origin, []).append(f"{name} {count}")
    return (f"{', '.join(counts)} ({origin})" for origin, counts in origins.items())
