"""The slopes of the heads follow another rule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.layers.positions.distance_bias import alibi_slopes


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
                model = evidence.model.with_settings(slopes=other)
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
