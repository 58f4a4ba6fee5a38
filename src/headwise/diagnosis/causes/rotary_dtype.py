"""The frequencies of the rotation are rounded to a narrower dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant


class RotaryDtypeCause(Cause):
    """The frequencies of the rotation are rounded to a narrower dtype.

    `model.bfloat16()` and `model.to(torch.bfloat16)` also round the buffer `inv_freq`, which
    `from_pretrained(..., dtype=torch.bfloat16)` keeps in float32. An error of a frequency grows
    with the position.

    Wrong:
        model = AutoModel.from_pretrained(folder).to(torch.bfloat16)

    Right:
        model = AutoModel.from_pretrained(folder, dtype=torch.bfloat16)

    Repair:
        Load the model in its dtype. `inv_freq.float()` afterwards does not bring the digits back.

    Confused with:
        dtype's rounding of weights: a cast rounds both.
    """

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
