"""``headwise layouts``: the catalogue of weight layouts, and drawings of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from headwise.cli import output
from headwise.support.text import describe_count

if TYPE_CHECKING:
    from headwise.layouts._layout import Layout

Count = Annotated[int | None, typer.Option(min=1, show_default=False)]


class _ListByDefault(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_command = args and (args[0] in self.commands or args[0].startswith("-"))
        return super().parse_args(ctx, args if is_command else ["list", *args])


layouts = typer.Typer(
    cls=_ListByDefault,
    help="List the weight layouts of the catalogue, or draw one of them.",
    rich_markup_mode=None,
)


@layouts.command("list")
def catalogue(
    word: Annotated[
        str, typer.Argument(metavar="WORD", show_default="all", help="Part of a layout's name.")
    ] = "",
) -> None:
    """List the layouts, with their tensors; "checked" if a test runs the real implementation."""
    from rich import box, table
    from rich.text import Text

    from headwise.layouts import registry

    console = output.make_console()
    listed = {
        heading: [entry for entry in family if word.lower() in entry.name]
        for heading, family in registry.layouts_by_family().items()
    }
    entries = [entry for family in listed.values() for entry in family]
    if not entries:
        registry.layout(word)  # raises an error with similar names
    for heading, family in listed.items():
        if not family:
            continue
        rows = table.Table(box=box.SIMPLE, pad_edge=False, show_header=False, expand=True)
        rows.add_column(width=max(len(entry.name) for entry in entries))
        rows.add_column(width=len("described"))
        rows.add_column(ratio=1)
        for entry in family:
            status = Text("described") if entry.unchecked else Text("checked", "green")
            required = [name for name in entry.tensors if name in entry.required]
            names = ", ".join(name.removesuffix(".weight") for name in required)
            rows.add_row(Text(entry.name, "bold"), status, Text(names))
        console.print(Text(heading), rows, sep="\n")
    checked = sum(not entry.unchecked for entry in entries)
    count = "All" if checked == len(entries) else str(checked)
    others = "" if count == "All" else " The others are described from the source and were not run."
    console.print(
        f"{describe_count(len(entries), 'layout')}. {count} are checked: a test runs the real "
        f"implementation, and a layer with its weights gives the same outputs.{others} "
        "To draw a layout: headwise layouts show llama"
    )


@layouts.command()
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A layout of headwise layouts.")],
    *,
    heads: Count = None,
    kv_heads: Count = None,
    head_dim: Count = None,
    embed_dim: Count = None,
) -> None:
    """Draw a small layout: the head of each row or column of each tensor."""
    from rich import padding, table
    from rich.text import Text

    from headwise.layouts import drawing, registry

    console, given = output.make_console(), registry.layout(name)
    named = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "embed_dim": embed_dim}
    counts = {axis: count for axis, count in named.items() if count is not None}
    drawn, sizes = drawing.draw(given, **counts), drawing.drawing_sizes(given, counts)
    console.print(Text(given.name, "bold"))
    grid = table.Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=10, style="dim")
    grid.add_column()
    for label, text in _facts(given, sizes):
        if text:
            grid.add_row(Text(label), Text(text))
    console.print(grid)
    console.print()
    console.print(Text(drawn), soft_wrap=True)
    console.print()
    console.print(Text("What is in no tensor", "bold"))
    for line in drawing.attention_spec_lines(given, sizes):
        console.print(padding.Padding(Text(line), (0, 0, 0, 2)))
    console.print()
    console.print(
        "q0 is query head 0, k0 and v0 are kv head 0, o0 is the part of the output projection for "
        "head 0; numbers on the left count from 0.",
        style="dim",
    )


def _facts(layout: Layout, sizes: Mapping[str, int]) -> list[tuple[str, str]]:
    is_checked = "yes: a test runs the real implementation"
    shown = ("heads", "kv_heads", "head_dim", "value_dim", "embed_dim")
    sharded = f"{', '.join(layout.sharded)} over processes" if layout.sharded else ""
    return [
        ("checked", f"no: {layout.unchecked}" if layout.unchecked else is_checked),
        ("source", layout.source),
        ("note", layout.note),
        *(("location", f"{template} ({role})") for role, template in layout.where.items()),
        ("sharded", sharded),
        ("drawn with", ", ".join(f"{axis} {sizes[axis]}" for axis in shown if axis in sizes)),
    ]
