"""Text of the demo, which ships with the package."""

from __future__ import annotations

from importlib import resources

TITLE = "Alice’s Adventures in Wonderland"
SOURCE = "Lewis Carroll, 1865, in the public domain"


def read_opening_paragraphs() -> tuple[str, ...]:
    """Return the opening of the book as paragraphs."""
    text = resources.files("headwise.models").joinpath("alice.txt").read_text(encoding="utf-8")
    return tuple(text.strip().split("\n\n"))
