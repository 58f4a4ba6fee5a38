"""Calls with a cache attend to padding before the tokens, or count it among their positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.causes.change_caller_mask import MaskChange, change_mask, has_masks
from headwise.diagnosis.causes.change_later_calls import (
    change_call_positions,
    change_model_in_later_calls,
    has_later_calls,
)
from headwise.diagnosis.simulation.attention_model import ForcedStage

MASKS: tuple[tuple[MaskChange, str], ...] = (
    (lambda _: None, "mask ignored"),
    (lambda mask: mask.flip(-1), "mask at the other end"),
    (torch.logical_not, "mask inverted"),
)
REPAIR = 'Mask.lengths(..., side="left") in every call with the cache'


class DecodingLeftPaddingCause(Cause):
    """Calls with a cache attend to padding before the tokens, or count it among their positions.

    The first call has the mask and the positions of the prompts. Each later call has one new token,
    and needs the mask of all keys: that of the prompts and a column for every new token. Its
    position is the number of tokens before it, without the padding.

    Wrong:
        layer(token, cache=cache)

    Right:
        layer(token, cache=cache, mask=Mask.lengths(keys=lengths, side="left"))

    Repair:
        Pass the whole mask in every call: `Mask.lengths(..., side="left")`, or an `attention_mask`
        that grows by a column for each token. Positions are `attention_mask.cumsum(-1) - 1`.

    Confused with:
        padding ignored: if the first call ignores the mask as well.
        position offset in decoding: if all prompts have the same number of padding tokens.
    """

    name: ClassVar[str] = "left padding in decoding"
    symptom: ClassVar[str] = (
        "Batched generation with left padding gives other text than each prompt alone"
    )
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary", "scores")
    cost: ClassVar[float] = 0.7

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return calls with earlier keys that do not use the mask, or positions, of the caller."""
        if not has_later_calls(evidence):
            return
        masks = MASKS if has_masks(evidence) else ()
        for change, words in masks:
            model = change_model_in_later_calls(evidence, ("scores",), partial(change_mask, change))
            yield Variant(model, {"padding": words}, REPAIR)
        if any(call.inputs.positions is not None for call in evidence.calls):
            repair = "positions that count the tokens and not the padding, in every call"
            model = change_model_in_later_calls(
                evidence, self.stages, _set_positions_by_cache_length
            )
            yield Variant(model, {"padding": "counted in the positions"}, repair)


def _set_positions_by_cache_length(forced: ForcedStage) -> ForcedStage:
    """Return the stage with positions that count all keys of the cache."""
    return replace(forced, call=change_call_positions(forced.call, lambda _: None))
