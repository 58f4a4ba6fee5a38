"""``headwise layouts``: the layouts that are known, and one of them drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from headwise.layouts.layout import Layout

Count = Annotated[int | None, typer.Option(min=1, show_default=False)]


class _ListsByItself(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Without a word behind it, the command lists."""
        return super().parse_args(ctx, args or ["list"])


layouts = typer.Typer(
    cls=_ListsByItself, help="Tell the weight layouts that are known, and draw one of them."
)


@layouts.command("list")
def catalogue() -> None:
    """List all: whether a test runs the real implementation, what it is called, what it is."""
    from rich.console import Console

    _list(Console(highlight=False))


@layouts.command()
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As headwise layouts lists it.")],
    *,
    heads: Count = None,
    kv_heads: Count = None,
    head_dim: Count = None,
    embed_dim: Count = None,
) -> None:
    """Draw one layout: which rows or columns of each tensor are whose.

    The sizes are small ones, unless some are given.
    """
    from rich.console import Console

    from headwise.layouts.registry import layout

    counts = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "embed_dim": embed_dim}
    _show(
        layout(name),
        {axis: count for axis, count in counts.items() if count is not None},
        Console(highlight=False),
    )


def _list(console: Console) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from headwise.layouts.registry import families

    known = [one for family in families().values() for one in family]
    widest = max(len(one.name) for one in known)
    for heading, family in families().items():
        table = Table(box=box.SIMPLE, pad_edge=False, show_header=False, expand=True)
        table.add_column(width=widest)
        table.add_column(width=len("described"))
        table.add_column(ratio=1)
        for one in family:
            standing = Text(_standing(one), "" if one.unchecked else "green")
            table.add_row(Text(one.name, "bold"), standing, _about(one))
        console.print(Text(heading))
        console.print(table)
    checked = sum(not one.unchecked for one in known)
    console.print(
        f"{len(known)} layouts. {checked} are checked: a test runs the real implementation, and a "
        "layer made of its weights gives the same outputs. The others are described: read from the "
        "source, and not run. One of them by its name: headwise layouts show llama"
    )


def _about(layout: Layout) -> RenderableType:
    """What its tensors are called, by which people know it, and what it is: a line each."""
    from rich.console import Group
    from rich.text import Text

    required = layout.required
    names = [name.removesuffix(".weight") for name in layout.tensors if name in required]
    lines = [Text(", ".join(names)), Text(layout.note or layout.source, "dim")]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*lines)


def _standing(layout: Layout) -> str:
    return "described" if layout.unchecked else "checked"


def _show(layout: Layout, given: dict[str, int], console: Console) -> None:
    from rich.padding import Padding
    from rich.text import Text

    from headwise.layouts.drawing import draw, function_lines, sizes_for

    drawn, sizes = draw(layout, **given), sizes_for(layout, given)
    why = f": {layout.unchecked}" if layout.unchecked else ": a test runs the real implementation"
    console.print(Text(layout.name, "bold"))
    _entry(console, "standing", _standing(layout) + why)
    _entry(console, "source", layout.source)
    if layout.note:
        _entry(console, "note", layout.note)
    for role, template in layout.where.items():
        _entry(console, "stands at", f"{template} ({role})")
    shown = ("heads", "kv_heads", "head_dim", "value_dim", "embed_dim")
    _entry(console, "drawn with", ", ".join(f"{n} {sizes[n]}" for n in shown if n in sizes))
    console.print()
    console.print(Text(drawn), soft_wrap=True)
    console.print()
    console.print(Text("What is in no tensor", "bold"))
    for line in function_lines(layout, sizes):
        console.print(Padding(Text(line), (0, 0, 0, 2)))
    console.print()
    console.print(
        "q0 is query head 0, k0 and v0 are kv head 0, o0 is what the output projection does with "
        "head 0; numbers on the left count from 0.",
        style="dim",
    )


def _entry(console: Console, what: str, words: str) -> None:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=10, style="dim")
    grid.add_column()
    grid.add_row(Text(what), Text(words))
    console.print(grid)
