"""True in the mask hides a key where it should show it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.causes.change_caller_mask import (
    change_mask,
    change_mask_of_model,
    has_masks,
)
from headwise.diagnosis.simulation.attention_model import ForcedStage

# Numbers that hide a key when they are added to its score.
LOWEST = (-1e4, -1e9, torch.finfo(torch.float32).min)


class MaskPolarityCause(Cause):
    """True in the mask hides a key where it should show it.

    `scaled_dot_product_attention` and Hugging Face mean "may attend" by True or 1.
    `torch.nn.MultiheadAttention` means "hidden".

    Wrong:
        F.scaled_dot_product_attention(q, k, v, attn_mask=key_padding_mask[:, None, None])

    Right:
        F.scaled_dot_product_attention(q, k, v, attn_mask=~key_padding_mask[:, None, None])

    Repair:
        Pass `~mask`. In headwise, say which convention a mask has: `Mask.from_torch(mask)`, or
        `Mask.from_torch_padding(mask)`.

    Confused with:
        padding side: if half of each sequence is padding.
        causal alignment: if the caller's mask is the causal mask.
    """

    name: ClassVar[str] = "mask polarity"
    symptom: ClassVar[str] = (
        "The padding is attended to and the tokens are hidden: the attention mask is inverted"
    )
    stages: ClassVar[tuple[str, ...]] = ("scores",)

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the inverted mask of the caller, and large numbers added where it is True."""
        if has_masks(evidence):
            repair = "pass ~mask: True means may attend"
            model = change_mask_of_model(evidence, torch.logical_not)
            yield Variant(model, {}, repair)
            for number in LOWEST:
                model = evidence.model.with_stage_function(
                    "scores", partial(_add_number_where_true, number)
                )
                yield Variant(model, {"added": number}, repair)


def _add_number_where_true(number: float, forced: ForcedStage) -> Tensor:
    mask = forced.call.inputs.mask
    if mask is None:
        return forced.usual_result()
    usual = change_mask(lambda _: None, forced).usual_result()
    return usual + number * mask.to(usual.dtype)
