"""The mask is added to the scores as the numbers 0 and 1."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import ClassVar

from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.simulation.attention_model import ForcedStage, compute_scores


class MaskAddedAsNumbersCause(Cause):
    """The mask is added to the scores as the numbers 0 and 1.

    A float mask is added to the scores. A mask of zeros and ones therefore raises some scores by 1.
    It must hold 0 where a query may attend and -inf where it may not.

    Wrong:
        scores = scores + mask.float()

    Right:
        scores = scores.masked_fill(~mask, -torch.inf)

    Repair:
        Pass the mask as bool, True where a query may attend.

    Confused with:
        padding ignored: if the mask has the same number for all keys of a row, which cancels in the
            softmax.
    """

    name: ClassVar[str] = "mask added as 0/1"
    symptom: ClassVar[str] = (
        "A mask changes the attention weights a little and hides nothing: it was added as 0 and 1"
    )
    stages: ClassVar[tuple[str, ...]] = ("scores",)

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return scores with the mask, or its inverse, added."""
        if any(call.inputs.mask is not None for call in evidence.calls):
            for is_inverted in (False, True):
                model = evidence.model.with_stage_function(
                    "scores", partial(_add_mask_as_numbers, is_inverted)
                )
                yield Variant(model, {}, "hide keys: scores.masked_fill(~mask, -inf)")


def _add_mask_as_numbers(is_inverted: bool, forced: ForcedStage) -> Tensor:
    inputs = forced.call.inputs
    mask = inputs.mask
    bare = replace(forced, call=replace(forced.call, inputs=replace(inputs, mask=None)))
    usual = compute_scores(bare)
    if mask is None:
        return usual
    return usual + (~mask if is_inverted else mask).to(usual.dtype)
