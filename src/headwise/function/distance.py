"""Formulas of score biases by distance: ALiBi's slopes, and T5's buckets.

ALiBi (Press et al. 2022, arXiv:2108.12409) is a penalty that grows linearly with distance. For n
heads, n a power of two, head h (from 1) has the slope ``2 ** (-8 h / n)``. For other numbers of
heads the paper's code (ofirpress/attention_with_linear_biases; BLOOM, Falcon) takes the slopes of
the next lower power of two, then every other slope of the next higher one. MPT's rule
(mosaicml/llm-foundry) gives the same slopes in the same order; MPT makes the 8 an option.

Falcon adds its bias before the scores are scaled, and rounds the slopes to bfloat16: its slopes
here are these, times the scale. It rounds slope times position too, which this rule does not; the
two are equal up to position 256 where slopes are powers of two, as with 2, 4 or 8 heads.

T5's relative position bias is one learned number for each head and bucket of distances. Each short
distance has its own bucket; longer ones share buckets that grow with the logarithm. The last
bucket holds all distances from ``max_distance`` on (Raffel et al. 2020, arXiv:1910.10683, section
2.1; Mesh TensorFlow, transformer_layers.py).
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwise.function.spec import BIAS_MAX, AlibiRule, AttentionSpec


def alibi_slope_values(num_heads: int, bias_max: float = BIAS_MAX) -> tuple[float, ...]:
    """Return the slope of each head."""
    # Python floats, which fake tensors and default devices do not affect.
    below = 2 ** (num_heads.bit_length() - 1)
    above = _geometric_slopes(2 * below, bias_max)
    return (_geometric_slopes(below, bias_max) + above[::2])[:num_heads]


def _geometric_slopes(count: int, bias_max: float) -> tuple[float, ...]:
    return tuple(2 ** (-bias_max * (head + 1) / count) for head in range(count))


def slopes_of(spec: AttentionSpec) -> Float[Tensor, " heads"] | None:
    """Return the slope of each head by ALiBi in float64, None for none."""
    rule = spec.score_bias
    if not isinstance(rule, AlibiRule):
        return None
    if rule.slopes is not None:
        return torch.tensor(rule.slopes, dtype=torch.float64)
    # The layers hold the slopes in float32.
    slopes = torch.tensor(alibi_slope_values(spec.num_heads, rule.bias_max))
    return spec.factor * slopes.bfloat16().double() if rule.before_scale else slopes.double()


def bucket_of_distances(
    distances: Int[Tensor, "*axes"],
    buckets: int,
    max_distance: int,
    *,
    bidirectional: bool,
    max_exact: int | None = None,
) -> Int[Tensor, "*axes"]:
    """Return the bucket of each distance ``key - query``.

    ``max_exact`` is the number of distances with their own bucket, on each side; None for half of
    the buckets, as in T5.
    """
    one_side = buckets // 2 if bidirectional else buckets
    near = max_exact or count_unshared_distances(buckets, bidirectional=bidirectional)
    later = (distances > 0) * (buckets - one_side)
    far = distances.abs() if bidirectional else (-distances).clamp(min=0)
    # Float32 in T5's order of operations: the last bit decides where a bucket begins.
    steps = torch.log(far.clamp(min=near).float() / near) / math.log(max_distance / near)
    shared = (near + (steps * (one_side - near)).long()).clamp(max=one_side - 1)
    return later + torch.where(far < near, far, shared)


def count_unshared_distances(buckets: int, *, bidirectional: bool) -> int:
    """Return the number of distances with their own bucket, on each side."""
    return buckets // (4 if bidirectional else 2)
