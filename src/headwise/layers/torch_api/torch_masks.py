"""How the drop-in reads torch's masks: as a `Mask` and a `ScoreBias`, with axes and a polarity.

A bool mask says True = may not attend. A float mask is added to the scores; its -inf masks, its
finfo.min does not. ``key_padding_mask`` stays (batch, keys): nothing is expanded to queries x keys.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from headwise.masks.bias_dtype import cast_bias
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from headwise.support.tracing import may_read_values

# Reading a (256, 256) mask takes 0.06 ms; below that the causal kernel saves less (docs/log.md).
CAUSAL_PAYS_FROM = 256
CAUSAL_BLOCK = 256


def read_masks(
    padding: Tensor | None,
    attn_mask: Tensor | None,
    *,
    num_heads: int,
    slots: int,
    hinted: bool,
    dtype: torch.dtype,
) -> tuple[Mask | None, ScoreBias | None]:
    """Both masks of torch's layer, each where it belongs.

    Args:
        padding: (batch, keys), bool or float.
        attn_mask: (queries, keys) or (batch*heads, queries, keys), bool or float.
        num_heads: how many heads the first axis of a 3-D mask holds.
        slots: keys appended by bias_k and add_zero_attn; they may always be attended.
        hinted: whether the caller said ``is_causal``. A hint that the mask is worth recognising,
            never a mask itself.
        dtype: what the queries are held in.
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
            mask, score_bias = _read(attn_mask, axes, slots, dtype)
    if padding is not None:
        more, added = _read(padding, "batch keys", slots, dtype)
        if more is not None:
            mask = more if mask is None else mask & more
        if added is not None:
            score_bias = added if score_bias is None else score_bias + added
    return mask, score_bias


def _read(
    mask: Tensor, axes: str, slots: int, dtype: torch.dtype
) -> tuple[Mask | None, ScoreBias | None]:
    if slots:
        mask = pad(mask, (0, slots))  # False and 0 both mean: may attend
    if mask.dtype == torch.bool:
        return Mask.may_attend(~mask, axes=axes), None
    return None, ScoreBias.dense(cast_bias(mask, dtype), axes=axes)


def hidden_sequences(padding: Tensor) -> list[int]:
    """Return the sequences of (batch, keys) whose keys are all hidden, or none if all are so."""
    if padding.dim() != 2:
        return []  # one sequence, without a batch axis
    hides = padding if padding.dtype == torch.bool else padding == -torch.inf
    hidden: list[bool] = hides.all(-1).tolist()
    return [] if all(hidden) else [index for index, is_hidden in enumerate(hidden) if is_hidden]


def is_causal(mask: Tensor, *, hinted: bool) -> bool:
    """Whether a 2-D mask blocks exactly the later keys, so that the causal kernel may serve it.

    Exact: every entry is read, block by block, and the first block that differs ends it. It is
    asked only where it pays: square, long enough, values at hand. On an accelerator reading a
    value waits for the device, so there it takes the caller's hint.
    """
    # First: a size compared while compiling becomes a condition of the graph.
    if not may_read_values(mask):
        return False
    if mask.dim() != 2 or mask.shape[0] != mask.shape[1] or mask.shape[0] < CAUSAL_PAYS_FROM:
        return False
    if mask.requires_grad or not (mask.device.type == "cpu" or hinted):
        return False
    for first in range(0, mask.shape[0], CAUSAL_BLOCK):
        stop = min(first + CAUSAL_BLOCK, mask.shape[0])
        earlier, own, later = mask[first:stop].tensor_split((first, stop), dim=1)
        if mask.dtype == torch.bool:
            block = torch.ones_like(own).triu(1)
            fits = not earlier.any() and bool(later.all())
        else:
            block = torch.full_like(own, -torch.inf).triu(1)
            fits = not earlier.count_nonzero() and (
                later.numel() == 0 or bool(later.amax() == -torch.inf)
            )
        if not fits or not torch.equal(own, block):
            return False
    return True
