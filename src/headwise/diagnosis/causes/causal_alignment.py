"""The causal mask is shifted, or missing, or where it should not be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.simulation.attention_model import ForcedStage

MOST = 12


class CausalAlignmentCause(Cause):
    """The causal mask is shifted, or missing, or where it should not be.

    With as many queries as keys, query i attends to keys 0 to i. With a cache there are fewer
    queries than keys. The last query then stands at the last key. `is_causal=True` of
    `scaled_dot_product_attention` puts the first query at the first key instead, and flash-attn did
    so before version 2.1.

    Wrong:
        F.scaled_dot_product_attention(q, k, v, is_causal=True)  # 1 query, 8 keys: sees key 0 alone

    Right:
        seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    Repair:
        Pass `Mask.causal(align="bottom-right")` where a cache is in use. For a mask that is off by
        one, start `tril` or `triu` at the other diagonal.

    Confused with:
        window off by one: on inputs of fewer tokens than the window holds.
        mask polarity: if the caller's mask is the causal mask.
    """

    name: ClassVar[str] = "causal alignment"
    symptom: ClassVar[str] = (
        "Generation with a key/value cache sees only the first keys; a causal mask is off by one"
    )
    stages: ClassVar[tuple[str, ...]] = ("scores",)

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return causal masks shifted by up to MOST keys, none, and the shift to the last key."""
        settings = evidence.model.settings
        left, right = settings.window or (None, None)
        is_causal = settings.causal or right == 0
        repair = "a query attends to keys up to its own position" if is_causal else "no causal mask"
        for shift in range(-MOST, MOST + 1) if is_causal or right is None else ():
            if shift or not is_causal:
                model = evidence.model.with_settings(causal=False, window=(left, shift))
                yield Variant(model, {"shift": shift}, repair)
        if is_causal:
            free = evidence.model.with_settings(causal=False, window=(left, right or None))
            yield Variant(free, {"causal": False}, repair)
            if any(call.earlier for call in evidence.calls):
                model = free.with_stage_function("scores", _scores_with_top_left_mask)
                yield Variant(model, {"align": "top-left"}, 'Mask.causal(align="bottom-right")')


def _scores_with_top_left_mask(forced: ForcedStage) -> Tensor:
    """Return scores in which query i of the call attends to the first i + 1 keys of all."""
    scores = forced.usual_result()
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(~seen, -torch.inf)
