"""DeBERTa's scores: queries and keys also meet learned vectors of their relative position.

    scale * (q_i.k_j + q_i.K[i - j] + k_j.Q[i - j]),    K = wpk P + bpk,    Q = wpq P + bpq

P is a table of 2 * span vectors, of the positions from -span on; farther ones take the outermost.
Without wpk and wpq the tokens' projections serve the table. The scale of three terms is
1/sqrt(3 head_dim), and that of two 1/sqrt(2 head_dim).

DeBERTa (He et al. 2021, arXiv:2006.03654) has j - i in the last term; its code, and transformers,
have i - j in both. Version 2 gives a vector to each position up to half of the span, and one to
several that are farther: their number grows with the logarithm.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from headwise.function.spec import DisentangledRule
from headwise.function.stages import repeat_kv_heads


def place_vectors(
    rule: DisentangledRule,
    table: Float[Tensor, "buckets embed_dim"],
    weight: Float[Tensor, " embed_dim"] | None,
    bias: Float[Tensor, " embed_dim"] | None,
) -> Float[Tensor, "buckets embed_dim"]:
    """Return the vectors of relative positions: the table, or its norm."""
    if weight is None or rule.eps is None:
        return table
    return F.layer_norm(table, weight.shape, weight, bias, rule.eps)


def row_of_distances(
    rule: DisentangledRule, distances: Int[Tensor, "*axes"]
) -> Int[Tensor, "*axes"]:
    """Return the row of the table for each distance ``key - query``."""
    ahead, far = -distances, distances.abs()
    if rule.max_distance is not None:
        # Float32 in the order of the code: the last bit decides where a row begins.
        mid = rule.span // 2
        steps = torch.log(far.clamp(min=mid).float() / mid)
        steps = steps / torch.log(torch.tensor((rule.max_distance - 1) / mid, dtype=torch.float32))
        shared = (torch.ceil(steps * (mid - 1)) + mid).long()
        ahead = torch.where(far <= mid, ahead, shared * ahead.sign())
    return (ahead + rule.span).clamp(0, 2 * rule.span - 1)


def place_terms(
    rule: DisentangledRule,
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    distances: Int[Tensor, "#batch 1 queries keys"],
    place_q: Float[Tensor, "1 heads buckets head_dim"] | None,
    place_k: Float[Tensor, "1 kv_heads buckets head_dim"] | None,
) -> Float[Tensor, "batch heads queries keys"]:
    """Return what the places add to q.k, before the scale; None leaves out a term."""
    heads = q.shape[1]
    rows = row_of_distances(rule, distances).expand(len(q), heads, -1, -1)
    terms = q.new_zeros(())
    if place_k is not None:
        terms = terms + (q @ repeat_kv_heads(place_k, heads=heads).mT).gather(-1, rows)
    if place_q is not None:
        of_keys = repeat_kv_heads(k, heads=heads) @ place_q.mT
        terms = terms + of_keys.gather(-1, rows.mT).mT
    return terms
