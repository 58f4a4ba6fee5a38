"""Calls with a cache attend to padding before the tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from headwise.diagnosis.causes.caller_masks import has_masks, model_with_mask
from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant


class DecodingLeftPaddingCause(Cause):
    """Calls with a cache attend to padding before the tokens.

    The first call has the mask of the prompts. Each later call has one new token, and needs the
    mask of all keys: that of the prompts and a column for every new token.

    Wrong:
        layer(token, cache=cache)

    Right:
        layer(token, cache=cache, mask=Mask.lengths(keys=lengths, side="left"))

    Repair:
        Pass the whole mask in every call: `Mask.lengths(..., side="left")`, or an `attention_mask`
        that grows by a column for each token.

    Confused with:
        padding ignored: if the first call ignores the mask as well.
        position offset in decoding: positions must be counted without the padding too; compare one
            prompt alone.
    """

    name: ClassVar[str] = "left padding in decoding"
    symptom: ClassVar[str] = (
        "Batched generation with left padding gives other text than each prompt alone"
    )
    stages: ClassVar[tuple[str, ...]] = ("scores",)
    cost: ClassVar[float] = 0.7

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return calls with earlier keys that do not use the mask, or use it at the other end."""
        if any(call.earlier for call in evidence.calls) and has_masks(evidence):
            repair = 'Mask.lengths(..., side="left") in every call with the cache'
            for change in (lambda _: None, lambda mask: mask.flip(-1), torch.logical_not):
                model = model_with_mask(evidence, change, only_later=True)
                yield Variant(model, {}, repair)
