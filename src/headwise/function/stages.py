"""Stages of attention, each computed from the ones before it, dense and in the dtype of its input.

    q, k, v                           projections, split into heads
    q after norm, k after norm        as they enter the rotation
    q after rotary, k after rotary    as they enter the scores
    scores                            logits of the softmax, with mask, bias and softcap
    weights                           after the softmax
    head outputs                      weights @ v
    output                            after the output projection

Every kernel is tested against this arithmetic:

    scores  = scale * q.k,  then softcap,  then + score_bias,  then mask
    weights = softmax of the scores over the keys, with an optional sink in the denominator
    head outputs = weights @ v

Attention Is All You Need (arXiv:1706.03762) section 3.2.1; softcap as in Gemma 2
(arXiv:2408.00118); the sink as in gpt-oss: one logit per head that adds to the denominator and has
no value vector. These functions allocate queries x keys; kernels may not.
"""

from __future__ import annotations

import math
from typing import TypedDict, Unpack

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise.function.distance import bucket_of_distances, slopes_of
from headwise.function.spec import AttentionSpec
from headwise.masks.bound import BoundMask
from headwise.masks.mask import Mask
from headwise.masks.score_bias import BoundBias, ScoreBias, cast_biases_for_sum


class ScoreOptions(TypedDict, total=False):
    """Options of the scores besides q and k."""

    mask: Mask | None
    score_bias: ScoreBias | None
    scale: float | None
    softcap: float | None


class AttentionOptions(ScoreOptions, total=False):
    """Options of an attention matrix besides q and k."""

    sink: Tensor | None


def project_heads(
    x: Float[Tensor, "batch length embed_dim"],
    weight: Float[Tensor, "heads head_dim embed_dim"],
    bias: Float[Tensor, "heads head_dim"] | None,
) -> Float[Tensor, "batch heads length head_dim"]:
    """Return x @ weight + bias for each head: queries, keys or values."""
    projected = torch.einsum("ble,hde->bhld", x.to(weight.dtype), weight)
    return projected if bias is None else projected + bias[:, None]


def scaled_products(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    *,
    scale: float,
    softcap: float | None,
) -> Float[Tensor, "batch heads queries keys"]:
    """Return scaled and softcapped products of queries and keys."""
    s = scale * (q @ repeat_kv_heads(k, heads=q.shape[1]).transpose(-2, -1))
    return s if softcap is None else softcap * torch.tanh(s / softcap)


def distance_bias(
    spec: AttentionSpec,
    distances: Int[Tensor, "batch 1 queries keys"],
    table: Float[Tensor, "buckets heads"] | None,
) -> Float[Tensor, "batch heads queries keys"] | None:
    """Return what is added to scores by distance, key less query; None for nothing.

    ``table`` holds the learned numbers of `BucketRule`.
    """
    if (slopes := slopes_of(spec)) is not None:
        return -slopes[:, None, None] * distances.abs().to(slopes.dtype)
    if (rule := spec.buckets) is None:
        return None
    assert table is not None
    buckets = bucket_of_distances(
        distances[:, 0], rule.buckets, rule.max_distance, bidirectional=rule.bidirectional
    )
    return table[buckets].permute(0, 3, 1, 2)


def visible_by_distance(
    spec: AttentionSpec,
    distances: Int[Tensor, "batch 1 queries keys"],
    mask: Bool[Tensor, "#batch #heads #queries #keys"] | None = None,
) -> Bool[Tensor, "batch heads queries keys"]:
    """Return True where causality, the window and a mask let a query attend to a key."""
    left, right = spec.sides or (None, None)
    seen = distances <= 0 if spec.causal else torch.ones_like(distances, dtype=torch.bool)
    seen = seen if left is None else seen & (distances >= -left)
    seen = seen if right is None else seen & (distances <= right)
    return seen if mask is None else seen & mask


def mix_values(
    weights: Float[Tensor, "batch heads queries keys"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
) -> Float[Tensor, "batch heads queries value_dim"]:
    """Return weights @ values for each head."""
    return weights @ repeat_kv_heads(v, heads=weights.shape[1])


def project_output(
    outputs: Float[Tensor, "batch heads queries value_dim"],
    weight: Float[Tensor, "o_heads o_width out_dim"],
    bias: Float[Tensor, " out_dim"] | None,
) -> Float[Tensor, "batch queries out_dim"]:
    """Return the sum of all heads' outputs through their parts of the projection, with its bias.

    Outputs of other heads that are as wide in all are split into those of the projection.
    """
    projected = merge_heads(outputs) @ weight.flatten(0, 1)
    return projected if bias is None else projected + bias


# ---- from queries and keys ----------------------------------------------------------------------


def scores(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    *,
    mask: Mask | None = None,
    score_bias: ScoreBias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Float[Tensor, "batch heads queries keys"]:
    """Return the softmax's input, -inf where masked. ``scale`` is 1/sqrt(head_dim) by default."""
    batch, heads, queries, _ = q.shape
    bound = {"batch": batch, "heads": heads, "queries": queries, "keys": k.shape[2]}
    rows = torch.arange(queries, device=q.device)
    return scores_at_rows(
        q,
        k,
        rows,
        mask=(mask or Mask()).bind(**bound, device=q.device),
        score_bias=(score_bias or ScoreBias()).bind(**bound, device=q.device, dtype=q.dtype),
        scale=default_scale(q) if scale is None else scale,
        softcap=softcap,
    )


def scores_at_rows(
    q: Float[Tensor, "batch heads rows head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    rows: Int[Tensor, " rows"],
    *,
    mask: BoundMask,
    score_bias: BoundBias,
    scale: float,
    softcap: float | None,
) -> Float[Tensor, "batch heads rows keys"]:
    """Return the scores of some queries: ``rows`` are their positions, ``q`` their vectors."""
    s = scaled_products(q, k, scale=scale, softcap=softcap)
    for part in cast_biases_for_sum(score_bias.parts_at_rows(rows), s.dtype):
        s = s + part
    return s.masked_fill(~mask.evaluate_rows(rows), -torch.inf)


def default_scale(q: Float[Tensor, "batch heads queries head_dim"]) -> float:
    """Return 1/sqrt(head_dim), the paper's scale; 1 for a head_dim of 0."""
    return 1.0 / math.sqrt(q.shape[-1]) if q.shape[-1] else 1.0


def weights_from_scores(
    s: Float[Tensor, "batch heads queries keys"], sink: Float[Tensor, " heads"] | None = None
) -> Float[Tensor, "batch heads queries keys"]:
    """Return the softmax of scores over keys, without the sink's column.

    A row without allowed keys is zero. With a sink, a row sums to 1 less the sink's share.
    """
    # The sink is an extra column; -inf stands for no sink, and also covers rows without keys.
    logit = s.new_full((), -torch.inf) if sink is None else sink.to(s.dtype)[:, None, None]
    s = torch.cat([s, logit.expand(*s.shape[:-1], 1)], dim=-1)
    peak = s.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(s.dtype).min)
    e = torch.exp(s - peak)
    total = e.sum(-1, keepdim=True)
    return e[..., :-1] / total.masked_fill(total == 0, 1.0)


def weights(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    *,
    sink: Float[Tensor, " heads"] | None = None,
    **options: Unpack[ScoreOptions],
) -> Float[Tensor, "batch heads queries keys"]:
    """Return the attention matrix as a dense tensor."""
    return weights_from_scores(scores(q, k, **options), sink)


def head_outputs(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    **options: Unpack[AttentionOptions],
) -> Float[Tensor, "batch heads queries value_dim"]:
    """Return weights @ v for each head."""
    return mix_values(weights(q, k, **options), v)


def repeat_kv_heads(
    kv: Float[Tensor, "batch kv_heads keys width"], *, heads: int
) -> Float[Tensor, "batch heads keys width"]:
    """Repeat each kv head: query head h uses kv head h // (heads // kv_heads)."""
    return kv.repeat_interleave(heads // kv.shape[1], dim=1) if kv.shape[1] != heads else kv


def split_heads(
    x: Float[Tensor, "batch length width"], *, heads: int
) -> Float[Tensor, "batch heads length head_width"]:
    """Split a projection into heads: head h is the h-th contiguous block of ``width / heads``."""
    # Not unflatten: torch's older ONNX exporter makes the length a constant there.
    batch, length, width = x.shape
    return x.reshape(batch, length, heads, width // heads).transpose(1, 2)


def merge_heads(
    outputs: Float[Tensor, "batch heads queries value_dim"],
) -> Float[Tensor, "batch queries width"]:
    """Concatenate head outputs along the width, as input of the output projection."""
    return outputs.transpose(1, 2).flatten(2)
