"""Text of the demo, which ships with the package, and the mask of padded texts."""

from __future__ import annotations

from importlib import resources

from jaxtyping import Integer
from torch import Tensor

from headwise.masks.mask import Mask

TITLE = "Alice’s Adventures in Wonderland"
SOURCE = "Lewis Carroll, 1865, in the public domain"


def read_opening_paragraphs() -> tuple[str, ...]:
    """Return the opening of the book as paragraphs."""
    text = resources.files("headwise.models").joinpath("alice.txt").read_text(encoding="utf-8")
    return tuple(text.strip().split("\n\n"))


def causal_padding_mask(lengths: Integer[Tensor, " batch"] | None) -> Mask:
    """Return a causal mask that hides padding after the first ``lengths[b]`` tokens."""
    if lengths is None:
        return Mask.causal()
    return Mask.causal() & Mask.lengths(queries=lengths, keys=lengths)
