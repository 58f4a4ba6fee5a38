"""Queries and keys are normalised by another formula, over other channels, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.simulation.settings import NormForm

KINDS: tuple[Literal["rms", "layer", "l2"], ...] = ("rms", "layer", "l2")
OVER: tuple[Literal["head", "width"], ...] = ("head", "width")


class QKNormKindCause(Cause):
    """Queries and keys are normalised by another formula, over other channels, or not at all.

    Qwen3 and Gemma 3 take the RMS norm of each head. OLMo 2 takes it over all heads at once.
    Chameleon takes a layer norm.

    Wrong:
        q = rms_norm(q.unflatten(-1, (heads, d)))  # OLMo 2

    Right:
        q = rms_norm(q).unflatten(-1, (heads, d))

    Repair:
        Take the norm that is reported: `QKNorm()` for Qwen3, `QKNorm(over="width")` for OLMo 2.

    Confused with:
        qk-norm weight offset: if all weights of the norm are equal.
        scale: RMS norm and L2 norm differ by sqrt(head_dim), which is a factor of the scores.
    """

    name: ClassVar[str] = "qk-norm kind"
    symptom: ClassVar[str] = (
        "Attention is wrong in models with QK-norm alone, such as Qwen3, Gemma 3 and OLMo 2"
    )
    stages: ClassVar[tuple[str, ...]] = (
        "q after norm",
        "k after norm",
        "q after rotary",
        "k after rotary",
    )
    is_whole: ClassVar[bool] = True

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the other kinds over a head and over the whole width; without weights for none."""
        norm = evidence.model.settings.norm
        if norm is None:
            for kind in KINDS:
                for over in OVER:
                    model = evidence.model.with_settings(norm=NormForm(kind, over))
                    parameters = {"norm": f"{kind} over the {over}, without weights"}
                    yield Variant(model, parameters, "leave out the norm of q and k")
            return
        repair = f"{norm.kind} norm over the {norm.over}"
        yield Variant(evidence.model.with_settings(norm=None), {"norm": "none"}, repair)
        for kind in KINDS:
            for over in OVER:
                if (kind, over) != (norm.kind, norm.over):
                    model = evidence.model.with_settings(norm=replace(norm, kind=kind, over=over))
                    yield Variant(model, {"norm": f"{kind} over the {over}"}, repair)
