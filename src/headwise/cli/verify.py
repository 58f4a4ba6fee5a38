"""``headwise verify``: whether two stored checkpoints hold the same function."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headwise.cli.checkpoints import Counts, Heads, KvHeads, RotaryWidth

if TYPE_CHECKING:
    from rich.console import Console

    from headwise.cli.checkpoints import Opened
    from headwise.layer.outputs import Outputs
    from headwise.layouts.layout import Layout
    from headwise.layouts.verify import Verification

SHOWN = 8  # differences, before the rest is counted
Named = Annotated[str | None, typer.Option(show_default="what the files leave possible")]


def verify(
    first: Annotated[Path, typer.Argument(show_default=False, help="Weights.")],
    second: Annotated[
        Path | None, typer.Argument(show_default=False, help="Weights, or a file of digests.")
    ] = None,
    *,
    first_layout: Named = None,
    second_layout: Named = None,
    outputs: Annotated[
        bool, typer.Option("--outputs", help="Run every layer of both in float64 as well.")
    ] = False,
    write_digests: Annotated[
        Path | None,
        typer.Option(help="Store the SHA-256 of every tensor of FIRST here.", show_default=False),
    ] = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    rotary_width: RotaryWidth = None,
) -> None:
    """Say whether two files hold the same function, byte for byte.

    The first is moved into the layout of the second, tensor by tensor, and
    compared. With digests as the second, every byte of the first is what it was
    when they were written. Exit status: 0 the same, 1 not.
    """
    given = {"heads": heads, "kv_heads": kv_heads, "rotary_width": rotary_width}
    if second is None and write_digests is None:
        raise typer.BadParameter("what to compare with: SECOND, or --write-digests")
    if write_digests is not None:
        _write(first, write_digests)
    if second is not None and second.suffix == ".json" and not _is_index(second):
        raise typer.Exit(_verify_digests(first, second))
    if second is not None:
        named = (first_layout, second_layout)
        raise typer.Exit(_verify(first, second, named, given, outputs=outputs))


def _is_index(path: Path) -> bool:
    return path.name.endswith(".index.json")


def _write(place: Path, path: Path) -> None:
    from headwise.layouts.checkpoint.source import open_source
    from headwise.layouts.digests import digests_of, write_digests
    from headwise.whole_files import require_writable

    require_writable(path)
    found = digests_of(open_source(place))
    typer.echo(f"{len(found)} digests: {write_digests(path, found)}")


def _verify_digests(place: Path, path: Path) -> int:
    from headwise.layouts.checkpoint.source import open_source
    from headwise.layouts.digests import digests_of, read_digests

    before, now = read_digests(path), digests_of(open_source(place))
    other = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    for name in other[:SHOWN]:
        word = "changed" if name in before and name in now else "gone" if name in before else "new"
        typer.echo(f"  {name}: {word}")
    if len(other) > SHOWN:
        typer.echo(f"  and {len(other) - SHOWN} more")
    typer.echo(
        f"{len(now) - sum(n in now for n in other)} of {len(now)} tensors are what they were"
    )
    return int(bool(other))


def _verify(
    first: Path,
    second: Path,
    named: tuple[str | None, str | None],
    given: Counts,
    *,
    outputs: bool,
) -> int:
    from headwise.cli.ending import aside
    from headwise.cli.progress import on_a_bar

    with on_a_bar(aside(), "loading torch") as progress:
        from rich.console import Console

        from headwise.cli.checkpoints import opened
        from headwise.layouts.registry import layout
        from headwise.layouts.verify import verify as compare

        one, other = opened(first, given), opened(second, given)
        known = other.known | one.known  # one config may stand for both
        layouts = tuple(
            layout(name) if name else side.detection(**known).require()
            for name, side in zip(named, (one, other), strict=True)
        )
        found = compare(
            one.source,
            other.source,
            layouts[0],
            layouts[1],
            progress=lambda done, total: progress("tensors", done, total),
            **known,
        )
        ran = _outputs(one, other, layouts, known) if outputs else []
    console = Console(highlight=False, soft_wrap=True)
    _show(found, layouts, console)
    _show_outputs(ran, console)
    return int(not found or not all(layer.is_same for layer in ran))


def _outputs(
    one: Opened, other: Opened, layouts: tuple[Layout, ...], known: dict[str, int]
) -> list[Outputs]:
    from headwise.layer.outputs import outputs_of_both

    config = one.config or other.config
    return outputs_of_both(one.source, other.source, layouts[0], layouts[1], config, **known)


def _show(found: Verification, layouts: tuple[Layout, ...], console: Console) -> None:
    from headwise.layouts.verify import lines_of

    console.print(f"{layouts[0].name} against {layouts[1].name}", markup=False)
    for line in lines_of(found, most=SHOWN):
        console.print(f"  {line}", markup=False)
    answer = "the same function, byte for byte" if found else "not the same"
    console.print(f"{found.same} tensors are the same: {answer}", markup=False)


def _show_outputs(ran: list[Outputs], console: Console) -> None:
    for layer in ran:
        word = "the same outputs" if layer.is_same else "OTHER OUTPUTS"
        console.print(
            f"  {layer.first} {layer.second}: {word}, {layer.apart:.1e} apart; rounding allows "
            f"{layer.allowed:.1e}",
            markup=False,
        )
