"""The mask of the caller is not used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.caller_masks import has_masks, model_with_mask
from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant


class PaddingIgnoredCause(Cause):
    """The mask of the caller is not used."""

    name: ClassVar[str] = "padding ignored"
    symptom: ClassVar[str] = "The result of a sequence depends on the other sequences of the batch"
    stages: ClassVar[tuple[str, ...]] = ("scores",)

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the model without the mask of the caller."""
        if has_masks(evidence):
            yield Variant(model_with_mask(evidence, lambda _: None), {}, "pass the mask on")
