"""Queries and keys are normalised after the rotation in place of before it, or the reverse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant


class QKNormPlaceCause(Cause):
    """Queries and keys are normalised after the rotation in place of before it, or the reverse."""

    name: ClassVar[str] = "qk-norm place"
    symptom: ClassVar[str] = "Queries and keys agree before the rotation and not after it"
    stages: ClassVar[tuple[str, ...]] = (
        "q after norm",
        "k after norm",
        "q after rotary",
        "k after rotary",
    )

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the other place."""
        norm = evidence.model.settings.norm
        if norm is not None:
            place: Literal["before", "after"] = "after" if norm.place == "before" else "before"
            model = evidence.model.with_settings(norm=replace(norm, place=place))
            yield Variant(model, {"place": place}, f"normalise {norm.place} the rotation")
