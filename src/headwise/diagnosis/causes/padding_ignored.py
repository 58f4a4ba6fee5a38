"""The mask of the caller is not used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.causes.change_caller_mask import change_mask_of_model, has_masks


class PaddingIgnoredCause(Cause):
    """The mask of the caller is not used.

    Repair:
        Pass the mask to every attention layer: `Mask.lengths(keys=lengths)`, or `attention_mask` in
        transformers.

    Confused with:
        left padding in decoding: if the first call has no padding.
    """

    name: ClassVar[str] = "padding ignored"
    symptom: ClassVar[str] = (
        "The result for a prompt depends on the other prompts of the batch: padding is not masked"
    )
    stages: ClassVar[tuple[str, ...]] = ("scores",)

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the model without the mask of the caller."""
        if has_masks(evidence):
            yield Variant(change_mask_of_model(evidence, lambda _: None), {}, "pass the mask on")
