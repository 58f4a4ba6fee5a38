"""Texts that ship with the package, and the mask of padded texts."""

from __future__ import annotations

from importlib import resources

from jaxtyping import Integer
from torch import Tensor

from headwise.masks.mask import Mask

TITLE = "Alice’s Adventures in Wonderland"
SOURCE = "Lewis Carroll, 1865, in the public domain"
HALF = 200  # sentences


def read_opening_paragraphs() -> tuple[str, ...]:
    """Return the opening of the book as paragraphs."""
    return tuple(_read("alice.txt").strip().split("\n\n"))


def read_sentences() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return 200 English sentences to choose and fit on, and 200 others to measure on.

    They have the licence of the package, 4 to 45 words, and 20 kinds: news, questions, recipes,
    instructions, science, law, talk, fiction, sports, history, lists, remarks, money, health,
    places, computing, arts, school, letters and the home. Sentence i is of kind i modulo 20, so
    both halves have ten of each.
    """
    lines = tuple(_read("sentences.txt").splitlines())
    return lines[:HALF], lines[HALF:]


def _read(name: str) -> str:
    return resources.files("headwise.models").joinpath(name).read_text(encoding="utf-8")


def causal_padding_mask(lengths: Integer[Tensor, " batch"] | None) -> Mask:
    """Return a causal mask that hides padding after the first ``lengths[b]`` tokens."""
    if lengths is None:
        return Mask.causal()
    return Mask.causal() & Mask.lengths(queries=lengths, keys=lengths)
