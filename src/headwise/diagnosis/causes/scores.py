"""Causes in the scores: their scale, their softcap and their bias by distance."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.moves.changes import find_factor_formula
from headwise.function.spec import Softcap
from headwise.layers.distance import alibi_slopes


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
        right, wq = evidence.model.settings.factor, evidence.model.weights["wq"]
        _, head_dim, width = wq.shape

        def make(scale: float) -> Variant:
            model = evidence.model.with_settings(scale=scale)
            form = find_factor_formula(scale, head_dim=head_dim, width=width)
            repair = f"scale={right:.12g} in place of {scale:.6g}"
            return Variant(model, {"scale": scale}, repair, {"form": form} if form else {})

        yield Family(make, tuple(right * 4.0**n for n in range(-4, 5)), is_log=True)


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
        right = evidence.model.settings.factor
        if right != 1.0:
            model = evidence.model.with_settings(scale=right**2)
            yield Variant(model, {"scale": right**2}, "scale q or the scores, not both")


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
        right = evidence.model.settings.cap
        repair = "softcap=None" if right is None else f"softcap={right:g}"
        if right is not None:
            yield Variant(evidence.model.with_settings(softcap=None), {"softcap": "none"}, repair)

        def make(softcap: float) -> Variant:
            model = evidence.model.with_settings(softcap=Softcap(softcap))
            return Variant(model, {"softcap": softcap}, repair)

        yield Family(make, tuple(2.0**n for n in range(-1, 9)), is_log=True)


class DistanceBiasCoefficientCause(Cause):
    """The bias by distance is multiplied by a number; 0 where it is left out.

    Falcon adds ALiBi before it divides the scores by sqrt(head_dim). BLOOM and MPT add it after.
    The same slopes then differ by a factor of sqrt(head_dim). A negative number is a wrong sign of
    the distance.

    Wrong:
        scores = q @ k.mT / head_dim**0.5 + slopes * distance  # Falcon's weights

    Right:
        scores = (q @ k.mT + slopes * distance) / head_dim**0.5

    Repair:
        Divide the slopes by the number that is reported.

    Confused with:
        distance bias slope rule: with one head, where rules differ by a factor alone.
    """

    name: ClassVar[str] = "distance bias coefficient"
    symptom: ClassVar[str] = (
        "ALiBi attention is too local or too flat (Falcon, BLOOM, MPT), by one factor in every head"
    )
    stages: ClassVar[tuple[str, ...]] = ("scores",)
    cost: ClassVar[float] = 0.9

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return no bias, and the family of all factors of the slopes.

        The slopes are those of the paper where there should be none.
        """
        model, slopes = evidence.model, evidence.model.settings.slopes
        if model.settings.buckets is not None:
            return  # a bias of another form
        is_missing = slopes is None
        if slopes is None:
            slopes = alibi_slopes(model.settings.num_heads).double()
        else:
            none = model.with_slopes(None)
            yield Variant(none, {"coefficient": 0.0}, "add the bias by distance: Alibi()")

        def make(factor: float) -> Variant:
            changed = model.with_slopes(factor * slopes)
            repair = f"slopes divided by {factor:.6g}"
            repair = "leave out the bias by distance" if is_missing else repair
            return Variant(changed, {"coefficient": factor}, repair)

        yield Family(make, (-1.0, 0.5, 2.0, 8.0))


class DistanceBiasSlopeRuleCause(Cause):
    """The slopes of the heads follow another rule.

    The paper states slopes for powers of two: 2 ** (-8 (h + 1) / n) for head h of n. For other
    numbers its code takes the slopes of the next lower power of two, and every second slope of the
    next higher one for the heads that remain.

    Wrong:
        slopes = 2 ** (-8 * (torch.arange(12) + 1) / 12)

    Right:
        slopes = alibi_slopes(12)

    Repair:
        Take `alibi_slopes(num_heads)` of headwise, with the `bias_max` of the model's config.

    Confused with:
        distance bias coefficient: if the slopes of all heads differ by the same factor.
        heads permuted: if the two rules have the same slopes in another order.
    """

    name: ClassVar[str] = "distance bias slope rule"
    symptom: ClassVar[str] = "ALiBi is right with 8, 16 or 32 heads and wrong with 12 or 40"
    stages: ClassVar[tuple[str, ...]] = ("scores",)

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the published rules, with exponents off by one and in reverse order."""
        slopes = evidence.model.settings.slopes
        if slopes is None:
            return
        for rule, other in _slopes_of_every_rule(len(slopes)).items():
            if not torch.equal(other, slopes):
                model = evidence.model.with_slopes(other)
                yield Variant(model, {"rule": rule}, "alibi_slopes(num_heads)")


def _slopes_of_every_rule(heads: int) -> dict[str, Tensor]:
    """Return slopes by the name of their rule."""
    index = torch.arange(heads, dtype=torch.float64)
    lower = 2 ** math.floor(math.log2(heads))
    upper = 2 ** math.ceil(math.log2(heads))
    rules: dict[str, Tensor] = {}
    for most in (4.0, 8.0, 16.0):
        words = "" if most == 8.0 else f", bias_max {most:g}"
        rules[f"of the paper's code{words}"] = alibi_slopes(heads, bias_max=most).double()
        rules[f"2 ** (-{most:g} (h + 1) / n){words}"] = 2 ** (-most * (index + 1) / heads)
        rules[f"2 ** (-{most:g} h / n){words}"] = 2 ** (-most * index / heads)
        for name, power in (("lower", lower), ("upper", upper)):
            rules[f"of the {name} power of two{words}"] = 2 ** (-most * (index + 1) / power)
    rules["2 ** -(h + 1)"] = 2 ** -(index + 1)
    rules["2 ** -h"] = 2**-index
    rules["1 / (h + 1)"] = 1 / (index + 1)
    return rules | {f"{name}, reversed": slopes.flip(0) for name, slopes in rules.items()}
