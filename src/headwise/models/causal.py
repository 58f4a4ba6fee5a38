"""Causal mask of a language model for padded sequences."""

from __future__ import annotations

from jaxtyping import Integer
from torch import Tensor

from headwise.masks.mask import Mask


def causal_padding_mask(lengths: Integer[Tensor, " batch"] | None) -> Mask:
    """Return a causal mask that hides padding after the first ``lengths[b]`` tokens."""
    if lengths is None:
        return Mask.causal()
    return Mask.causal() & Mask.lengths(queries=lengths, keys=lengths)
