"""SVG pictures of layouts side by side, with light and dark colours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle

from headwise.layouts._layout import Layout
from headwise.layouts.drawing import (
    DrawnCell,
    draw_axis_strips,
    drawing_sizes,
    rotary_pairs,
    short_name,
)
from tools.svg import frame

ROW = 12  # pixels of a row, enough for its name
BAND, GAP, LEFT, TOP = 128, 44, 40, 58

_STYLE = """
.start { text-anchor: end }
.thin { font-size: 9.5px }
.band { stroke: #ffffff; fill-opacity: 0.3 }
.odd { fill-opacity: 0.5 }
.q { fill: #1b716d } .k { fill: #c2571a } .v { fill: #5b4b9e } .o { fill: #b0306a }
.other { fill: #8a7a00 }
"""
_DARK = """  .band { stroke: #16191d; fill-opacity: 0.45 }
  .odd { fill-opacity: 0.7 }
  .q { fill: #3fa7a1 } .k { fill: #e08347 } .v { fill: #8f7fd6 } .o { fill: #dd6a9c }
  .other { fill: #c4b23a }
"""


@dataclass(frozen=True)
class Panel:
    """A column of a picture: a title, a line below it, and bands from top to bottom."""

    title: str
    about: str
    cells: Sequence[DrawnCell]

    @property
    def rows(self) -> int:
        """The number of rows of all bands."""
        return self.cells[-1].start + self.cells[-1].length


def make_panel(layout: Layout, tensor: str, about: str, **sizes: int) -> Panel:
    """Return a panel of the axis of a stored tensor that is split into heads."""
    axes = draw_axis_strips(layout, drawing_sizes(layout, sizes))[tensor]
    return Panel(layout.name, about, next(strip.cells for strip in axes if strip.cells))


def draw_panels(panels: Sequence[Panel], *, alt: str) -> str:
    """Return an SVG picture of panels side by side.

    Args:
        panels: the columns.
        alt: the text for screen readers.
    """
    drawn = [
        line for at, panel in enumerate(panels) for line in _panel(panel, LEFT + at * (BAND + GAP))
    ]
    height = TOP + ROW * max(panel.rows for panel in panels) + 18
    width = LEFT + len(panels) * (BAND + GAP)
    return frame(drawn, width, height, alt=alt, style=_STYLE, dark=_DARK)


def draw_rotary_pairs(head_dim: int, *, alt: str) -> str:
    """Return an SVG picture of the two pairings of a head's rows for rotation."""
    drawn, row = [], 2 * ROW
    for at, rotary in enumerate(("half-split", "interleaved")):
        x = LEFT + at * (BAND + GAP)
        drawn += _titles(x, rotary, "rows of one head")
        for kind, pair in zip(cycle("qkvo"), rotary_pairs(rotary, head_dim), strict=False):
            for channel, other in (pair, pair[::-1]):
                y = TOP + row * channel
                drawn.append(_band(x, y, row, kind, odd=False))
                text = f"{channel} with {other}"
                drawn.append(f'<text x="{x + 8}" y="{y + row / 2 + 4:g}">{text}</text>')
    width, height = LEFT + 2 * (BAND + GAP), TOP + row * head_dim + 18
    return frame(drawn, width, height, alt=alt, style=_STYLE, dark=_DARK)


def _panel(panel: Panel, x: int) -> Iterable[str]:
    yield from _titles(x, panel.title, panel.about)
    for cell in panel.cells:
        y, height = TOP + ROW * cell.start, ROW * cell.length
        tensor, heads = cell.owners[0]
        yield _band(x, y, height, short_name(tensor), odd=bool(heads[0] % 2))
        middle = y + height / 2 + 4
        thin = ' class="thin"' if height == ROW else ""
        yield f'<text{thin} x="{x + 8}" y="{middle:g}">{escape(cell.name)}</text>'
        yield f'<text class="soft start" x="{x - 6}" y="{y + 10}">{cell.start}</text>'


def _titles(x: int, title: str, about: str) -> list[str]:
    return [
        f'<text class="title" x="{x}" y="24">{escape(title)}</text>',
        f'<text class="soft" x="{x}" y="42">{escape(about)}</text>',
    ]


def _band(x: int, y: int, height: int, kind: str, *, odd: bool) -> str:
    kinds = f"band {kind if kind in 'qkvo' else 'other'}{' odd' if odd else ''}"
    return f'<rect class="{kinds}" x="{x}" y="{y}" width="{BAND}" height="{height}"/>'
