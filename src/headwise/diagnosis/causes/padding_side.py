"""The mask hides the other end of each sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.caller_masks import has_masks, model_with_mask
from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant


class PaddingSideCause(Cause):
    """The mask hides the other end of each sequence."""

    name: ClassVar[str] = "padding side"
    symptom: ClassVar[str] = "Batches differ from single sequences: the wrong end is hidden"
    stages: ClassVar[tuple[str, ...]] = ("scores",)

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the mask with its keys in reverse order."""
        if has_masks(evidence):
            model = model_with_mask(evidence, lambda mask: mask.flip(-1))
            yield Variant(model, {}, 'Mask.lengths(..., side="left"), or side="right"')
