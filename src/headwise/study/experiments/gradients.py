"""Closed formulas for the gradients of a layer's projections, head by head.

A head computes, with W as torch stores it (a row for each output):

    q = x Wq.T    k = source Wk.T    v = source Wv.T    P = softmax(scale * q k.T)    o = P v

and the output is the sum of o Wo.T over the heads, with any biases. Let G = dL/doutput be the
gradient of the loss. Then, summed over the batch,

    dL/dWo = G.T o
    dL/dWv = (P.T dO).T source                        dO = G Wo
    dL/dWq = scale * (dS k).T x                       dP = dO v.T
    dL/dWk = scale * (dS.T q).T source                dS = P * (dP - rowsum(P * dP))

dP is the gradient of the weights, and dS that of the scores. The step from dP to dS is the
softmax's: the derivative of weight p_j by score s_i is p_j * ((i == j) - p_i), so a score's
gradient depends on how far its key exceeds the average of dP over the row. All other steps are
matrix products. Only G depends on the other heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.function import rounding, stages
from headwise.function.rounding import Roundoff, sum_error_bound
from headwise.masks.mask import Mask


class WeightGradients(NamedTuple):
    """dL/dW of the four projections of each head, or the bound of each element's error."""

    wq: Float[Tensor, "heads head_dim embed_dim"]
    wk: Float[Tensor, "heads head_dim source_dim"]
    wv: Float[Tensor, "heads value_dim source_dim"]
    wo: Float[Tensor, "heads out_dim value_dim"]


class ForwardPass(NamedTuple):
    """The tensors of a forward pass that the gradients need, and the gradient of the output.

    Attributes:
        x: the input of the queries.
        source: the input of keys and values; ``x`` in self-attention.
        q, k, v: the projections, biases included.
        wo: each head's part of the output projection.
        upstream: dL/doutput.
        mask: the pairs that may be attended.
        scale: factor of q.k; 1/sqrt(head_dim) by default.
    """

    x: Float[Tensor, "batch queries embed_dim"]
    source: Float[Tensor, "batch keys source_dim"]
    q: Float[Tensor, "batch heads queries head_dim"]
    k: Float[Tensor, "batch heads keys head_dim"]
    v: Float[Tensor, "batch heads keys value_dim"]
    wo: Float[Tensor, "heads out_dim value_dim"]
    upstream: Float[Tensor, "batch queries out_dim"]
    mask: Mask | None = None
    scale: float | None = None


def projection_gradients(forward: ForwardPass) -> WeightGradients:
    """Compute dL/dWq, dL/dWk, dL/dWv and dL/dWo of each head, by the formulas of this module."""
    x, source, q, k, v, wo, upstream, mask, scale = forward
    scale = stages.default_scale(q) if scale is None else scale
    weights = stages.weights(q, k, mask=mask, scale=scale)
    of_outputs = upstream[:, None] @ wo
    of_scores = softmax_gradient(weights, of_outputs @ v.mT)
    return WeightGradients(
        wq=_sum_gradient_over_tokens(scale * (of_scores @ k), x),
        wk=_sum_gradient_over_tokens(scale * (of_scores.mT @ q), source),
        wv=_sum_gradient_over_tokens(weights.mT @ of_outputs, source),
        wo=_sum_gradient_over_tokens(weights @ v, upstream).mT,
    )


def softmax_gradient(
    weights: Float[Tensor, "batch heads queries keys"],
    of_weights: Float[Tensor, "batch heads queries keys"],
) -> Float[Tensor, "batch heads queries keys"]:
    """Compute dS = P * (dP - rowsum(P * dP)), the gradient of the scores from that of the weights.

    Args:
        weights: P, the softmax of the scores over the keys.
        of_weights: dP, the gradient of the weights.
    """
    return weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True))


def rounding_bounds(forward: ForwardPass) -> WeightGradients:
    """Return the largest difference that rounding can make between two computations.

    The bound has three parts: the floors of `function.rounding` for dq, dk and dv in the dtype
    of ``q``; the rounding of dO, in which the gradients are linear; and the sum over the tokens.
    ``q``, ``k`` and ``v`` count as exact.
    """
    x, source, q, k, v, wo, upstream = (part.detach().double() for part in forward[:7])
    r = Roundoff.of(forward.q.dtype)
    scale = stages.default_scale(q) if forward.scale is None else forward.scale
    rows = rounding.row_rounding(q, k, r, mask=forward.mask, scale=scale)
    weights = rows.weights
    of_outputs = upstream[:, None] @ wo
    error = (
        r.u * sum_error_bound(wo.shape[1]) * (upstream.abs()[:, None] @ wo.abs())
        + r.U * of_outputs.abs()
    )
    floors = rounding.gradient_floors(rows, q, k, v, of_outputs, scale=scale, bias_gradient=None)
    of_weights, weights_error = of_outputs @ v.mT, error @ v.abs().mT
    of_scores = softmax_gradient(weights, of_weights)
    scores_error = weights * (weights_error + (weights * weights_error).sum(-1, keepdim=True))
    outputs_error = rounding.product_floor(rows, v)

    def summed(gradient: Tensor, error: Tensor, tokens: Tensor) -> Tensor:
        over = (
            r.u * sum_error_bound(tokens.shape[0] * tokens.shape[1]) + 2 * r.U
        )  # inputs and result
        return _sum_gradient_over_tokens(error + over * gradient.abs(), tokens.abs())

    return WeightGradients(
        wq=summed(scale * of_scores @ k, floors["q"] + abs(scale) * scores_error @ k.abs(), x),
        wk=summed(
            scale * of_scores.mT @ q, floors["k"] + abs(scale) * scores_error.mT @ q.abs(), source
        ),
        wv=summed(weights.mT @ of_outputs, floors["v"] + weights.mT @ error, source),
        wo=summed(weights @ v, outputs_error, upstream).mT,
    )


def _sum_gradient_over_tokens(
    gradient: Float[Tensor, "batch heads length width"], tokens: Float[Tensor, "batch length dim"]
) -> Float[Tensor, "heads width dim"]:
    """Return a weight's gradient from its outputs' gradient and its inputs, summed over tokens."""
    return torch.einsum("bhlw,bld->hwd", gradient, tokens)
