"""``headwise layouts``: the layouts that are known, and one of them drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from rich.console import Console

    from headwise.layouts.layout import Layout

Count = Annotated[int | None, typer.Option(min=1, show_default=False)]


class _ListsByItself(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Without a command behind it, the group lists: all, or those with a word in their name."""
        is_other = args and (args[0] in self.commands or args[0].startswith("-"))
        return super().parse_args(ctx, args if is_other else ["list", *args])


layouts = typer.Typer(
    cls=_ListsByItself,
    help="Tell the weight layouts that are known, and draw one of them.",
    rich_markup_mode=None,
)


@layouts.command("list")
def catalogue(
    word: Annotated[
        str, typer.Argument(metavar="WORD", show_default="all", help="Those with it in their name.")
    ] = "",
) -> None:
    """List them: whether a test runs the real implementation, and what its tensors are called."""
    from rich.console import Console

    _list(word, Console(highlight=False))


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


def _list(word: str, console: Console) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from headwise.layouts.registry import families, layout

    found = {
        heading: [one for one in family if word.lower() in one.name]
        for heading, family in families().items()
    }
    known = [one for family in found.values() for one in family]
    if not known:
        layout(word)  # refuses, and names those that are near
    widest = max(len(one.name) for one in known)
    for heading, family in found.items():
        if not family:
            continue
        table = Table(box=box.SIMPLE, pad_edge=False, show_header=False, expand=True)
        table.add_column(width=widest)
        table.add_column(width=len("described"))
        table.add_column(ratio=1)
        for one in family:
            standing = Text("described") if one.unchecked else Text("checked", "green")
            required = one.required
            names = [n.removesuffix(".weight") for n in one.tensors if n in required]
            table.add_row(Text(one.name, "bold"), standing, Text(", ".join(names)))
        console.print(Text(heading))
        console.print(table)
    checked = sum(not one.unchecked for one in known)
    console.print(
        f"{len(known)} layouts. {checked} are checked: a test runs the real implementation, and a "
        "layer made of its weights gives the same outputs. The others are described: read from the "
        "source, and not run. One of them by its name: headwise layouts show llama"
    )


def _show(layout: Layout, given: dict[str, int], console: Console) -> None:
    from rich.padding import Padding
    from rich.text import Text

    from headwise.layouts.layout_drawing import draw, function_lines, sizes_for

    drawn, sizes = draw(layout, **given), sizes_for(layout, given)
    checked = f"no: {layout.unchecked}" if layout.unchecked else "yes: a test runs the real thing"
    console.print(Text(layout.name, "bold"))
    _entry(console, "checked", checked)
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
