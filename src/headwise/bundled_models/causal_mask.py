"""The mask of a language model that may be given padded sequences."""

from __future__ import annotations

from jaxtyping import Integer
from torch import Tensor

from headwise.masks.mask import Mask


def mask_of(lengths: Integer[Tensor, " batch"] | None) -> Mask:
    """No later token, and no padding: the first ``lengths[b]`` tokens of a sequence are real."""
    if lengths is None:
        return Mask.causal()
    return Mask.causal() & Mask.lengths(queries=lengths, keys=lengths)
