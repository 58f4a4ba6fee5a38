"""Queries and keys are normalised by another formula, over other channels, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant

KINDS: tuple[Literal["rms", "layer", "l2"], ...] = ("rms", "layer", "l2")
OVER: tuple[Literal["head", "width"], ...] = ("head", "width")


class QKNormKindCause(Cause):
    """Queries and keys are normalised by another formula, over other channels, or not at all."""

    name: ClassVar[str] = "qk-norm kind"
    symptom: ClassVar[str] = "Attention is wrong in models with QK-norm, and right in those without"
    stages: ClassVar[tuple[str, ...]] = (
        "q after norm",
        "k after norm",
        "q after rotary",
        "k after rotary",
    )

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the other kinds over a head and over the whole width."""
        norm = evidence.model.settings.norm
        if norm is None:
            return
        repair = f"{norm.kind} norm over the {norm.over}"
        yield Variant(evidence.model.with_settings(norm=None), {"norm": "none"}, repair)
        for kind in KINDS:
            for over in OVER:
                if (kind, over) != (norm.kind, norm.over):
                    model = evidence.model.with_settings(norm=replace(norm, kind=kind, over=over))
                    yield Variant(model, {"norm": f"{kind} over the {over}"}, repair)
