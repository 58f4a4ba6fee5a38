"""Queries are scaled before a function that scales the scores once more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant


class ScaleTwiceCause(Cause):
    """Queries are scaled before a function that scales the scores once more.

    `scaled_dot_product_attention` divides by sqrt(head_dim) by default. Code that divided the
    queries must stop doing so.

    Wrong:
        F.scaled_dot_product_attention(q / head_dim**0.5, k, v)

    Right:
        F.scaled_dot_product_attention(q, k, v)

    Repair:
        Scale q or the scores, not both: `scale=1.0` keeps the function from scaling.

    Confused with:
        scale: this is a scale of 1 / head_dim.
        factor: if the weights of q were divided.
    """

    name: ClassVar[str] = "scale twice"
    symptom: ClassVar[str] = (
        "Attention is far too flat after a port to scaled_dot_product_attention: scaled twice"
    )
    stages: ClassVar[tuple[str, ...]] = ("scores",)
    cost: ClassVar[float] = 0.8

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the square of the scale."""
        right = evidence.model.settings.scale
        if right != 1.0:
            model = evidence.model.with_settings(scale=right**2)
            yield Variant(model, {"scale": right**2}, "scale q or the scores, not both")
