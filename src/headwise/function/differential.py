"""Differential attention: outputs of pairs of heads, each the difference of two softmaxes.

    o_p = (1 - init) * rms_norm(W_p V_p - factor * W_p' V_p),    p' = p + heads / 2
    factor = exp(q1.k1) - exp(q2.k2) + init,    init = 0.8 - 0.6 exp(-0.3 layer)

V_p are the values of both heads of the pair, side by side, 2 value_dim wide, and so is its output:
"head" 2p of a layer's head outputs is the first half of it, and 2p + 1 the second. Differential
Transformer (Ye et al. 2024, arXiv:2410.05258); DiffLlama in transformers.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.function.spec import DifferentialRule


def usual_init(layer: int) -> float:
    """Return the constant part of the factor in a layer, from 0."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


def pair_values(
    v: Float[Tensor, "batch kv_heads keys value_dim"],
) -> Float[Tensor, "batch kv_heads keys pair_width"]:
    """Return the values that each kv head's queries mix: those of both heads of a pair."""
    pairs = torch.cat(v.chunk(2, 1), -1)
    return torch.cat((pairs, pairs), 1)


def difference_factor(
    rule: DifferentialRule, q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor
) -> Float[Tensor, ""]:
    """Return the factor of each pair's second softmax."""
    return (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + float(rule.init)


def subtract_pairs(
    rule: DifferentialRule,
    outputs: Float[Tensor, "batch heads queries pair_width"],
    factor: Float[Tensor, ""],
) -> Float[Tensor, "batch heads queries value_dim"]:
    """Return head outputs: the normalised differences of pairs, in halves."""
    first, second = outputs.chunk(2, 1)
    pairs = first - factor * second
    root = (pairs.square().mean(-1, keepdim=True) + rule.eps).rsqrt()
    return halve_pairs((1 - rule.init) * root * pairs)


def halve_pairs(
    pairs: Float[Tensor, "batch pairs queries pair_width"],
) -> Float[Tensor, "batch heads queries value_dim"]:
    """Return the halves of each pair's channels as two heads."""
    halves: Tensor = pairs.unflatten(-1, (2, -1))
    return halves.transpose(2, 3).flatten(1, 2)
