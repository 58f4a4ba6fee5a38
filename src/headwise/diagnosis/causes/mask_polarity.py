"""True in the mask hides a key where it should show it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from headwise.diagnosis.causes.caller_masks import has_masks, model_with_mask
from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant


class MaskPolarityCause(Cause):
    """True in the mask hides a key where it should show it."""

    name: ClassVar[str] = "mask polarity"
    symptom: ClassVar[str] = "The padding is attended to and the tokens are hidden"
    stages: ClassVar[tuple[str, ...]] = ("scores",)

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the inverted mask of the caller."""
        if has_masks(evidence):
            model = model_with_mask(evidence, torch.logical_not)
            yield Variant(model, {}, "pass ~mask: True means may attend")
