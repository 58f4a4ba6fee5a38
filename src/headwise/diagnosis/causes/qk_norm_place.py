"""Queries and keys are normalised after the rotation in place of before it, or the reverse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant


class QKNormPlaceCause(Cause):
    """Queries and keys are normalised after the rotation in place of before it, or the reverse.

    A rotation keeps lengths. The order therefore matters only if the norm has weights that differ
    by channel, or a mean.

    Wrong:
        q = norm(rotate(q))  # Qwen3

    Right:
        q = rotate(norm(q))

    Repair:
        `QKNorm(place=...)` with the place that is reported. Hunyuan normalises after the rotation,
        most others before it.

    Confused with:
        rotary missing: at position 0 all three agree.
        qk-norm kind: RMS norm with equal weights is the same at both places.
    """

    name: ClassVar[str] = "qk-norm place"
    symptom: ClassVar[str] = (
        "QK-norm before or after RoPE: queries and keys agree without the rotation"
    )
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
