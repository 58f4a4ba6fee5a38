"""Another factor of q.k."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.moves.factor_formulas import find_factor_formula


class ScaleCause(Cause):
    """The scores are multiplied by another number.

    The usual number is 1 / sqrt(head_dim). T5 and GPT-Neo have 1. Gemma has 1 /
    sqrt(query_pre_attn_scalar), Granite its `attention_multiplier`, muP 1 / head_dim. A mistake is
    1 / sqrt(width).

    Wrong:
        scores = q @ k.mT / width**0.5

    Right:
        scores = q @ k.mT / head_dim**0.5

    Repair:
        `scale=...` with the number that is reported.

    Confused with:
        scale twice: the number is the square of the scale.
        factor: a factor of q, or of k, gives the same scores.
        rotary attention factor: if all channels turn.
    """

    name: ClassVar[str] = "scale"
    symptom: ClassVar[str] = (
        "Attention is too flat or too sharp, by the same factor everywhere: softmax scale"
    )
    stages: ClassVar[tuple[str, ...]] = ("scores",)

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the family of all factors of the right sign."""
        right, wq = evidence.model.settings.scale, evidence.model.weights["wq"]
        _, head_dim, width = wq.shape

        def make(scale: float) -> Variant:
            model = evidence.model.with_settings(scale=scale)
            form = find_factor_formula(scale, head_dim=head_dim, width=width)
            repair = f"scale={right:.12g} in place of {scale:.6g}"
            return Variant(model, {"scale": scale}, repair, {"form": form} if form else {})

        yield Family(make, tuple(right * 4.0**n for n in range(-4, 5)), is_log=True)
