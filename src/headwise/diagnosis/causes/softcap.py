"""Scores are capped by another number, not at all, or where they should not be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant


class SoftcapCause(Cause):
    """Scores are capped by another number, not at all, or where they should not be."""

    name: ClassVar[str] = "softcap"
    symptom: ClassVar[str] = "Large scores are larger than in the original; small ones agree"
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
