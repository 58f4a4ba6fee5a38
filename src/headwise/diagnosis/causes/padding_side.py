"""The mask hides the other end of each sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.causes.change_caller_mask import change_mask_of_model, has_masks


class PaddingSideCause(Cause):
    """The mask hides the other end of each sequence.

    Decoders are padded on the left, so that the last token is at the end. Encoders are padded on
    the right.

    Wrong:
        tokenizer.padding_side = "right"  # and a mask for the left

    Right:
        tokenizer.padding_side = "left"

    Repair:
        Pad and mask the same side: `Mask.lengths(keys=lengths, side="left")`.

    Confused with:
        mask polarity: if half of each sequence is padding.
        padding ignored: on a batch of equal lengths, which has no padding.
    """

    name: ClassVar[str] = "padding side"
    symptom: ClassVar[str] = (
        "Batches differ from single prompts: left padding and right padding are mixed up"
    )
    stages: ClassVar[tuple[str, ...]] = ("scores",)

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the mask with its keys in reverse order."""
        if has_masks(evidence):
            model = change_mask_of_model(evidence, lambda mask: mask.flip(-1))
            yield Variant(model, {}, 'Mask.lengths(..., side="left"), or side="right"')
