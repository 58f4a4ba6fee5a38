"""Picture of the ways to share attention: ``python -m tools.sharding_picture``.

It writes docs/images/sharding.svg, with a panel for each way. A grid is a tensor of tokens (rows) x
heads (columns), coloured by rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

from tools.svg import frame

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "sharding.svg"
RANKS, CELLS, CELL = 4, 8, 10  # ranks; cells of an axis of a grid; pixels of a cell
GRID = CELLS * CELL
WIDTH, HEIGHT, COLUMNS, LEFT, TOP = 268, 192, 3, 16, 16
ALT = (
    "Six ways to share attention over four ranks. Heads: each rank has some columns of tokens x "
    "heads. Sequence by heads: rows, exchanged for columns. Gather: each rank has some rows of "
    "queries x keys, and all keys. Ring: the same, with keys that travel. Documents: whole "
    "documents. FSDP2: slices of the weights."
)

Owner = Callable[[int, int], int]  # (row, column) -> rank, or -1 for a cell of no rank

_STYLE = """
.cell { stroke: #ffffff; stroke-width: 1 }
.rank0 { fill: #1b716d } .rank1 { fill: #c2571a } .rank2 { fill: #5b4b9e } .rank3 { fill: #8a7a00 }
.none { fill: #ecebe6 }
.arrow { stroke: #5d656e; stroke-width: 1.5; fill: none }
"""
_DARK = """  .cell { stroke: #16191d }
  .rank0 { fill: #3fa7a1 } .rank1 { fill: #e08347 }
  .rank2 { fill: #8f7fd6 } .rank3 { fill: #c4b23a }
  .none { fill: #262b31 }
  .arrow { stroke: #a3abb3 }
"""


@dataclass(frozen=True)
class Panel:
    """One way: its name, the case for it, its grids, and what it sends."""

    title: str
    when: str
    grids: tuple[Owner, ...]
    axes: tuple[str, ...]  # below each grid
    sends: str


def _by_row(row: int, column: int) -> int:  # noqa: ARG001
    return row * RANKS // CELLS


def _by_column(row: int, column: int) -> int:  # noqa: ARG001
    return column * RANKS // CELLS


def _causal(row: int, column: int) -> int:
    """Return the owner of a query's row under zig-zag: an early and a late pair of rows."""
    chunk = row * 2 * RANKS // CELLS
    return min(chunk, 2 * RANKS - 1 - chunk) if column <= row else -1


def _ring(row: int, column: int) -> int:
    """Return the owner where its queries meet the keys that it holds in the first of n steps."""
    rank = _by_row(row, column)
    return rank if _by_column(row, column) == rank else -1


def _documents(row: int, column: int) -> int:
    half = CELLS // 2
    return 2 * (row // half) + column // half


PANELS = (
    Panel(
        "heads_plan: heads",
        "weights or layers are too large, few tokens",
        (_by_column,),
        ("tokens x heads",),
        "2 all-reduces of tokens x embed_dim",
    ),
    Panel(
        'attend(by="heads")',
        "long sequences, ranks divide the heads",
        (_by_row, _by_column),
        ("tokens x heads", "in attention"),
        "queries, keys, values and outputs, once each",
    ),
    Panel(
        'attend(by="gather")',
        "heads do not divide, all keys fit",
        (_causal,),
        ("queries x keys, zig-zag",),
        "keys and values to every rank",
    ),
    Panel(
        'attend(by="ring")',
        "not even all keys fit on a rank",
        (_ring,),
        ("queries x keys, step 1 of 4",),
        "keys and values, step by step",
    ),
    Panel(
        "scan_part",
        "many documents, a model that fits",
        (_documents,),
        ("documents",),
        "nothing",
    ),
    Panel(
        "FSDP2, torch's own",
        "weights that do not fit, with all of these",
        (_by_row,),
        ("rows of a weight",),
        "each weight, before it is used",
    ),
)


def picture() -> str:
    """Return the SVG picture of all panels."""
    rows = -(-len(PANELS) // COLUMNS)
    lines: list[str] = []
    for index, panel in enumerate(PANELS):
        row, column = divmod(index, COLUMNS)
        lines += _draw_panel(panel, LEFT + column * WIDTH, TOP + row * HEIGHT)
    width, height = LEFT + COLUMNS * WIDTH, TOP + rows * HEIGHT
    return frame(lines, width, height, alt=ALT, style=_STYLE, dark=_DARK)


def _draw_panel(panel: Panel, x: int, y: int) -> Iterator[str]:
    yield f'<text class="title" x="{x}" y="{y + 14}">{escape(panel.title)}</text>'
    yield f'<text x="{x}" y="{y + 32}">{escape(panel.when)}</text>'
    for nth, (owner, axes) in enumerate(zip(panel.grids, panel.axes, strict=True)):
        left, top = x + nth * (GRID + 40), y + 46
        yield from _draw_grid(owner, left, top)
        yield f'<text class="soft" x="{left}" y="{top + GRID + 14}">{escape(axes)}</text>'
        if nth:
            middle = top + GRID // 2
            yield f'<path class="arrow" d="M{left - 30} {middle} h20 m-5 -4 l5 4 l-5 4"/>'
    yield f'<text class="soft" x="{x}" y="{y + 46 + GRID + 32}">sent: {escape(panel.sends)}</text>'


def _draw_grid(owner: Owner, left: int, top: int) -> Iterator[str]:
    for row in range(CELLS):
        for column in range(CELLS):
            rank = owner(row, column)
            kind = "none" if rank < 0 else f"rank{rank}"
            yield (
                f'<rect class="cell {kind}" x="{left + column * CELL}" y="{top + row * CELL}" '
                f'width="{CELL}" height="{CELL}"/>'
            )


if __name__ == "__main__":
    PICTURE.write_text(picture(), "utf-8")
