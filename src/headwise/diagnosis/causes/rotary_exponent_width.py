"""Frequencies are theta ** (-2i / n) with another n, such as head_dim for the rotated width."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant


class RotaryExponentWidthCause(Cause):
    """Frequencies are theta ** (-2i / n) with another n, such as head_dim for the rotated width.

    With partial rotation, n is the rotated width in GPT-NeoX, GPT-J, Phi and GLM. Code that was
    written for a whole rotation has head_dim there.

    Wrong:
        theta ** (-torch.arange(0, width, 2) / head_dim)

    Right:
        theta ** (-torch.arange(0, width, 2) / width)

    Repair:
        Divide by the number that is reported.

    Confused with:
        rotary theta: always. Another n has the frequencies of theta ** (width / n). The result
            names both.
        rotary partial width: for the pairs that both turn.
    """

    name: ClassVar[str] = "rotary exponent width"
    symptom: ClassVar[str] = (
        "Partial RoPE agrees at position 0 and drifts, with the right theta and rotary_dim"
    )
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary")
    cost: ClassVar[float] = 0.9

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return every even n up to twice head_dim."""
        rotary = evidence.model.settings.rotary
        if rotary is None or rotary.width < 4:
            return
        head_dim = evidence.model.weights["wq"].shape[1]
        right = rotary.exponent_width or rotary.width
        for base in range(4, 2 * head_dim + 1, 2):
            if base != right:
                model = evidence.model.with_rotary(exponent_width=base)
                yield Variant(model, {"exponent width": base}, f"theta ** (-2i / {right})")
