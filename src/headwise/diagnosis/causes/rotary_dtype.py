"""The frequencies of the rotation are rounded to a narrower dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant


class RotaryDtypeCause(Cause):
    """The frequencies of the rotation are rounded to a narrower dtype."""

    name: ClassVar[str] = "rotary dtype"
    symptom: ClassVar[str] = (
        "model.to(torch.bfloat16) differs from a model loaded in bfloat16, more at later tokens"
    )
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary")

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the frequencies rounded to each 16-bit dtype."""
        if evidence.model.settings.rotary is None:
            return
        for dtype in (torch.bfloat16, torch.float16):
            name = str(dtype).removeprefix("torch.")
            repair = "keep inv_freq in float32: load with dtype=..., without .to(dtype) afterwards"
            yield Variant(evidence.model.with_rotary(dtype=dtype), {"dtype": name}, repair)
