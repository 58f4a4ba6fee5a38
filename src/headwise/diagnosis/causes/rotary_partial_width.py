"""Another number of channels of a head turns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant


class RotaryPartialWidthCause(Cause):
    """Another number of channels of a head turns.

    GPT-NeoX turns a quarter of each head, Phi and GLM a half. The config has `rotary_pct`,
    `rotary_dim` or `partial_rotary_factor`.

    Wrong:
        q = rotate(q)

    Right:
        q = torch.cat([rotate(q[..., :width]), q[..., width:]], -1)

    Repair:
        `Rotary(width=...)` with the number of channels that is reported.

    Confused with:
        rotary pairs across the whole head: if the pairs of few channels matter.
        rotary exponent width: frequencies often follow the width.
    """

    name: ClassVar[str] = "rotary partial width"
    symptom: ClassVar[str] = (
        "Outputs agree at the first token and drift with the position: wrong partial_rotary_factor"
    )
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary")

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return every even width, with frequencies that follow it and with the right ones."""
        rotary = evidence.model.settings.rotary
        if rotary is None:
            return
        head_dim = evidence.model.weights["wq"].shape[1]
        for width in range(2, head_dim + 1, 2):
            if width != rotary.width:
                bases = {None, rotary.exponent_width or rotary.width}
                for base in sorted(bases, key=str):
                    model = evidence.model.with_rotary(width=width, exponent_width=base)
                    yield Variant(model, {"width": width}, f"Rotary(width={rotary.width})")
