"""The frame of the pictures of the documentation, in light and dark colours."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

_STYLE = """
.card { fill: #ffffff; stroke: #e3e1db }
text { font: 11px sans-serif; fill: #1d2126 }
.title { font-weight: bold; font-size: 12px }
.soft { fill: #5d656e; font-size: 10px }
"""
_DARK_STYLE = """  .card { fill: #16191d; stroke: #31363c }
  text { fill: #e8e6e1 }
  .soft { fill: #a3abb3 }
"""


def frame(
    drawn: Iterable[str], width: int, height: int, *, alt: str, style: str = "", dark: str = ""
) -> str:
    """Return an SVG picture on a card.

    Args:
        drawn: its lines.
        width: in pixels.
        height: in pixels.
        alt: the text for screen readers.
        style: rules of CSS beside those of the card and of text.
        dark: rules for a dark page.
    """
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{escape(alt)}">',
        f"<style>{_STYLE}{style}@media (prefers-color-scheme: dark) {{\n{_DARK_STYLE}{dark}}}\n"
        "</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6"/>',
        *drawn,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
