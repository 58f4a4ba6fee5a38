"""Channel i of a partial rotation turns with i + head_dim / 2 in place of i + width / 2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant


class RotaryWholeHeadPairsCause(Cause):
    """Channel i of a partial rotation turns with i + head_dim / 2 in place of i + width / 2.

    Wrong:
        a, b = x[..., : width // 2], x[..., head_dim // 2 : head_dim // 2 + width // 2]

    Right:
        a, b = x[..., : width // 2], x[..., width // 2 : width]

    Repair:
        Rotate the first `width` channels as if they were a head.

    Confused with:
        rotary partial width: for the first half of the pairs alone.
        rotary pairing: with one pair of channels.
    """

    name: ClassVar[str] = "rotary pairs across the whole head"
    symptom: ClassVar[str] = (
        "Partial RoPE with the right rotary_dim and theta differs: pairs across the whole head"
    )
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary")

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return pairs that are half a head apart."""
        rotary = evidence.model.settings.rotary
        head_dim = evidence.model.weights["wq"].shape[1]
        if rotary is None or rotary.width == head_dim:
            return
        model = evidence.model.with_rotary(pairing="half-split", span=head_dim // 2)
        yield Variant(
            model, {"span": head_dim // 2}, f"pair channel i with i + {rotary.width // 2}"
        )
