"""``headwise verify``: whether two stored checkpoints hold the same function."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.checkpoint_options import NAMES, Counts, HeadDim, Heads, KvHeads, RotaryWidth
from headwise.cli.output import NO, YES, missing_folder_note, stderr_console

SHOWN = 8  # tensors, before the rest is counted
DIGESTS = ".json"
Named = Annotated[str | None, typer.Option(show_default="what the files leave possible")]


def verify(
    first: Annotated[Path, typer.Argument(show_default=False, help="Weights.")],
    second: Annotated[
        Path | None,
        typer.Argument(show_default=False, help="Weights, or digests: a file that ends in .json."),
    ] = None,
    *,
    first_layout: Named = None,
    second_layout: Named = None,
    outputs: Annotated[
        bool, typer.Option("--outputs", help="Run every layer of both in float64 as well.")
    ] = False,
    write_digests: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Store the SHA-256 of every tensor of FIRST in a new file; with SECOND, only if "
            "both are the same.",
            show_default=False,
        ),
    ] = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = None,
    rotary_width: RotaryWidth = None,
) -> None:
    """Say whether two files hold the same function, byte for byte.

    The first is moved into the layout of the second, tensor by tensor, and
    compared. With digests as the second, every byte of the first is what it was
    when they were written.
    """
    given = dict(zip(NAMES, (heads, kv_heads, head_dim, rotary_width), strict=True))
    named = (first_layout, second_layout)
    if second is None and write_digests is None:
        raise typer.BadParameter("Name SECOND, to compare with, or --write-digests FILE.json.")
    made_folder = "" if write_digests is None else missing_folder_note(write_digests)
    if write_digests is not None:
        _require_new(write_digests)
    if second is None or _is_digests(second):
        if outputs or any(value is not None for value in (*named, *given.values())):
            raise typer.BadParameter("Digests are compared without options of layouts and counts.")
        status = YES if second is None else _verify_digests(first, second)
    else:
        status = _verify(first, second, named, given, outputs=outputs)
    if write_digests is not None and not status:
        _write(first, write_digests, made_folder)
    raise typer.Exit(status)


def _is_digests(path: Path) -> bool:
    from headwise.checkpoints.source import INDEX

    return path.suffix == DIGESTS and not path.name.endswith(INDEX)


def _require_new(path: Path) -> None:
    from headwise.checkpoints.staging import require_free
    from headwise.support.atomic_write import require_writable

    if not _is_digests(path):
        raise typer.BadParameter(
            f"--write-digests {path}: name a file that ends in {DIGESTS}, as verify knows digests "
            "by that."
        )
    require_free(path)
    require_writable(path)


def _write(place: Path, path: Path, made_folder: str) -> None:
    from headwise.checkpoints.digests import digests_of, write_digests
    from headwise.checkpoints.source import open_source

    found = digests_of(open_source(place))
    if made_folder:
        typer.echo(made_folder)
    typer.echo(f"{len(found)} digests: {write_digests(path, found)}")


def _verify_digests(place: Path, path: Path) -> int:
    from headwise.checkpoints.digests import digests_of, read_digests
    from headwise.checkpoints.source import open_source

    before, now = read_digests(path), digests_of(open_source(place))
    other = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    for name in other[:SHOWN]:
        word = "changed" if name in before and name in now else "gone" if name in before else "new"
        typer.echo(f"  {name}: {word}")
    if len(other) > SHOWN:
        typer.echo(f"  and {len(other) - SHOWN} more")
    unchanged = len(now) - sum(name in now for name in other)
    total = len({**before, **now})
    answer = f"Not the same: {unchanged} of {total}" if other else f"The same: all {total}"
    typer.echo(f"{answer} tensors are as in the digests.")
    return NO if other else YES


def _verify(
    first: Path,
    second: Path,
    named: tuple[str | None, str | None],
    given: Counts,
    *,
    outputs: bool,
) -> int:
    from headwise.cli.progress_bar import progress_bar

    with progress_bar(stderr_console(), "loading torch") as progress:
        from rich.console import Console

        from headwise.diagnosis.verify import verify as compare

        found = compare(
            first,
            second,
            first_layout=named[0],
            second_layout=named[1],
            outputs=outputs,
            progress=progress,
            **given,
        )
    for line in found.lines:
        Console(highlight=False, soft_wrap=True).print(line, markup=False)
    return YES if found else NO
