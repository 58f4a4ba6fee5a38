"""Picture of what a function's outputs show: ``python -m tools.probes_picture``.

It writes docs/images/probes.svg, with a panel for each kind of input. A grid holds the weights of
queries (rows) x keys (columns).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

from tools.svg import frame

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "probes.svg"
ALT = (
    "Three kinds of input. One token: its weight is 1, so the output is linear in the token and "
    "shows values, the output projection and their biases. Two tokens: the weight of each head "
    "follows from the outputs, and shows queries, keys, the scale and the rotation. Longer inputs: "
    "one key is changed, and the queries whose outputs change see it, which shows masks, windows "
    "and biases by distance."
)
SIDE, WIDTH, HEIGHT, LEFT, TOP = 96, 268, 236, 16, 16
KNOCKED, TOKENS, WINDOW = 2, 8, 4  # the key that is changed; of a grid with a causal window

_STYLE = """
.cell { stroke: #ffffff; stroke-width: 1; fill: #ecebe6 }
.seen { fill: #1b716d; fill-opacity: 0.35 }
.changed { fill: #c2571a }
.stage { fill: #1b716d; fill-opacity: 0.2; stroke: #1b716d }
.known { fill: #ecebe6; stroke: #c9c6be }
.idle { fill: none; stroke: #c9c6be; stroke-dasharray: 3 3 }
.in { text-anchor: middle }
.arrow { stroke: #5d656e; stroke-width: 1.5; fill: none }
"""
_DARK = """  .cell { stroke: #16191d; fill: #262b31 }
  .seen { fill: #3fa7a1; fill-opacity: 0.4 }
  .changed { fill: #e08347 }
  .stage { fill: #3fa7a1; fill-opacity: 0.25; stroke: #3fa7a1 }
  .known { fill: #262b31; stroke: #4a5058 }
  .idle { stroke: #4a5058 }
  .arrow { stroke: #a3abb3 }
"""


@dataclass(frozen=True)
class Panel:
    """One kind of input.

    Attributes:
        title: its name.
        formula: what the outputs are.
        cells: the class of each cell of its grid, by query and key.
        stages: the projections that it shows.
        known: the projections that an earlier input has shown.
        shows: in words.
    """

    title: str
    formula: str
    cells: tuple[tuple[str, ...], ...]
    stages: str
    known: str
    shows: str


def _long() -> tuple[tuple[str, ...], ...]:
    """Return the cells of a causal window, with one key that is changed."""
    rows = []
    for query in range(TOKENS):
        seen = [0 <= query - key < WINDOW for key in range(TOKENS)]
        kinds = ("changed" if key == KNOCKED else "seen" for key in range(TOKENS))
        rows.append(tuple(kind if see else "" for kind, see in zip(kinds, seen, strict=True)))
    return tuple(rows)


PANELS = (
    Panel("One token", "y = M x + c", (("seen",),), "vo", "", "v, o and their biases"),
    Panel(
        "Two tokens",
        "y - f(x1): the weight of x2, head by head",
        (("seen", "changed"), ("seen", "changed")),
        "qk",
        "vo",
        "q, k, the scale, the rotation",
    ),
    Panel(
        "Longer inputs",
        "one key changes: who sees it?",
        _long(),
        "",
        "qkvo",
        "masks, windows, distance, length",
    ),
)


def picture() -> str:
    """Return the SVG picture of all panels."""
    lines = [
        line for at, panel in enumerate(PANELS) for line in _draw_panel(panel, LEFT + at * WIDTH)
    ]
    width = LEFT + len(PANELS) * WIDTH
    return frame(lines, width, HEIGHT, alt=ALT, style=_STYLE, dark=_DARK)


def _draw_panel(panel: Panel, x: int) -> Iterator[str]:
    yield f'<text class="title" x="{x}" y="{TOP + 14}">{escape(panel.title)}</text>'
    yield f'<text x="{x}" y="{TOP + 32}">{escape(panel.formula)}</text>'
    top = TOP + 48
    side = SIDE // len(panel.cells)
    for row, cells in enumerate(panel.cells):
        for column, kind in enumerate(cells):
            place = f'x="{x + column * side}" y="{top + row * side}"'
            yield f'<rect class="cell {kind}" {place} width="{side}" height="{side}"/>'
    yield f'<text class="soft" x="{x}" y="{top + SIDE + 14}">queries x keys</text>'
    yield from _draw_stages(panel, x + SIDE + 16, top)
    yield f'<text x="{x}" y="{top + SIDE + 46}">shows: {escape(panel.shows)}</text>'


def _draw_stages(panel: Panel, x: int, top: int) -> Iterator[str]:
    """Yield a box of each projection: shown here, known by now, or without effect."""
    size = 28
    for at, role in enumerate("qkvo"):
        left, y = x + at % 2 * (size + 8), top + at // 2 * (size + 8)
        kind = "stage" if role in panel.stages else "known" if role in panel.known else "idle"
        yield f'<rect class="{kind}" x="{left}" y="{y}" width="{size}" height="{size}" rx="4"/>'
        middle = f'x="{left + size // 2}" y="{y + size // 2 + 4}"'
        yield f'<text class="in" {middle}>{role}</text>'


if __name__ == "__main__":
    PICTURE.write_text(picture(), "utf-8")
