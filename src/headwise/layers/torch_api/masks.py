"""Torch's masks: conversion to a `Mask` and a `ScoreBias`.

True in a bool mask means may not attend. A float mask is added to the scores: -inf masks, finfo.min
does not. ``key_padding_mask`` stays (batch, keys) and is never expanded to queries x keys.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias, cast_bias
from headwise.support.tracing import may_read_values

# Reading a (256, 256) mask takes 0.06 ms; for smaller masks the causal kernel saves less than that
# (docs/log.md).
CAUSAL_PAYS_FROM = 256
CAUSAL_BLOCK = 256


def convert_masks(
    padding: Tensor | None,
    attn_mask: Tensor | None,
    *,
    num_heads: int,
    slots: int,
    hinted: bool,
    dtype: torch.dtype,
) -> tuple[Mask | None, ScoreBias | None]:
    """Return torch's two masks as one `Mask` and one `ScoreBias`, None for an absent one.

    ``slots`` are keys appended by bias_k and add_zero_attn, open to every query; ``hinted`` is the
    call's ``is_causal``: a hint to test ``attn_mask``, never a mask; ``dtype`` that of the queries.
    """
    mask: Mask | None = None
    score_bias: ScoreBias | None = None
    if attn_mask is not None:
        if not slots and is_causal(attn_mask, hinted=hinted):
            mask = Mask.causal()
        else:
            axes = "queries keys"
            if attn_mask.dim() == 3:
                attn_mask = attn_mask.unflatten(0, (-1, num_heads))
                axes = "batch heads queries keys"
            mask, score_bias = _convert_mask(attn_mask, axes, slots, dtype)
    if padding is not None:
        padding_mask, padding_bias = _convert_mask(padding, "batch keys", slots, dtype)
        if padding_mask is not None:
            mask = padding_mask if mask is None else mask & padding_mask
        if padding_bias is not None:
            score_bias = padding_bias if score_bias is None else score_bias + padding_bias
    return mask, score_bias


def _convert_mask(
    mask: Tensor, axes: str, slots: int, dtype: torch.dtype
) -> tuple[Mask | None, ScoreBias | None]:
    if slots:
        mask = pad(mask, (0, slots))  # False and 0 both mean may attend
    if mask.dtype == torch.bool:
        return Mask.may_attend(~mask, axes=axes), None
    return None, ScoreBias.dense(cast_bias(mask, dtype), axes=axes)


def is_causal(mask: Tensor, *, hinted: bool) -> bool:
    """True if a 2-D mask hides exactly the later keys, so that the causal kernel can be used.

    The test reads every entry, block by block, and stops at the first difference. It runs only for
    square masks that are long enough to profit. On an accelerator, where reading a value waits for
    the device, it runs only with ``hinted``.
    """
    # First, since a size compared while compiling becomes a condition of the graph.
    if not may_read_values(mask):
        return False
    if mask.dim() != 2 or mask.shape[0] != mask.shape[1] or mask.shape[0] < CAUSAL_PAYS_FROM:
        return False
    if mask.requires_grad or not (mask.device.type == "cpu" or hinted):
        return False
    for first in range(0, mask.shape[0], CAUSAL_BLOCK):
        stop = min(first + CAUSAL_BLOCK, mask.shape[0])
        earlier, diagonal, later = mask[first:stop].tensor_split((first, stop), dim=1)
        if mask.dtype == torch.bool:
            causal = torch.ones_like(diagonal).triu(1)
            fits = not earlier.any() and bool(later.all())
        else:
            causal = torch.full_like(diagonal, -torch.inf).triu(1)
            fits = not earlier.count_nonzero() and (
                later.numel() == 0 or bool(later.amax() == -torch.inf)
            )
        if not fits or not torch.equal(diagonal, causal):
            return False
    return True
