"""Scores are capped by another number, not at all, or where they should not be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant


class SoftcapCause(Cause):
    """Scores are capped by another number, not at all, or where they should not be.

    A softcap c replaces each score s by c * tanh(s / c). Scores much smaller than c do not change.
    Gemma 2 has c = 50. `scaled_dot_product_attention` has no softcap.

    Wrong:
        scores = q @ k.mT * scale

    Right:
        scores = softcap * torch.tanh(q @ k.mT * scale / softcap)

    Repair:
        `softcap=...` with the number that is reported, before the mask.

    Confused with:
        scale: on scores that are all small, neither shows; on scores of one size, both look alike.
    """

    name: ClassVar[str] = "softcap"
    symptom: ClassVar[str] = (
        "Gemma 2 differs where scores are large: attn_logit_softcapping is ignored"
    )
    stages: ClassVar[tuple[str, ...]] = ("scores",)

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return no softcap, and the family of all caps."""
        right = evidence.model.settings.softcap
        repair = "softcap=None" if right is None else f"softcap={right:g}"
        if right is not None:
            yield Variant(evidence.model.with_settings(softcap=None), {"softcap": "none"}, repair)

        def make(softcap: float) -> Variant:
            model = evidence.model.with_settings(softcap=softcap)
            return Variant(model, {"softcap": softcap}, repair)

        yield Family(make, tuple(2.0**n for n in range(-1, 9)), is_log=True)
