"""Another factor of q.k."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant


class ScaleCause(Cause):
    """The scores are multiplied by another number."""

    name: ClassVar[str] = "scale"
    symptom: ClassVar[str] = "Attention is too flat or too sharp, by the same factor everywhere"
    stages: ClassVar[tuple[str, ...]] = ("scores",)

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the family of all factors of the right sign."""
        right = evidence.model.settings.scale

        def make(scale: float) -> Variant:
            model = evidence.model.with_settings(scale=scale)
            return Variant(model, {"scale": scale}, f"scale={right:.12g} in place of {scale:.6g}")

        yield Family(make, tuple(right * 4.0**n for n in range(-4, 5)), is_log=True)
