"""The gradients of a layer's projections in closed form, head by head.

One head, with W as torch stores it (a row for each output):

    q = x Wq.T    k = source Wk.T    v = source Wv.T    P = softmax(scale * q k.T)    o = P v

and the output is the sum of o Wo.T over the heads; biases may be added anywhere. Let G = dL/doutput
be what comes back from the loss. Then, summed over the batch,

    dL/dWo = G.T o                                    what was read, where it was missed
    dL/dWv = (P.T dO).T source                        dO = G Wo: what of G this head can change
    dL/dWq = scale * (dS k).T x                       dS = P * (dO v.T - D)
    dL/dWk = scale * (dS.T q).T source                D = sum over the keys of P * (dO v.T)

dS comes of the softmax: a weight p_j moves with a score s_i by p_j * ((i == j) - p_i), so that a
score matters as far as its key is better than the average key, D, of the row. Nothing here is
another head's, but for G, in which the loss has seen them all.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from headwise import reference
from headwise.error_budget import rounding
from headwise.error_budget.rounding import Roundoff, growth
from headwise.masks.mask import Mask


class WeightGradients(NamedTuple):
    """dL/dW of the four projections of each head, or a bound of each element's error."""

    wq: Float[Tensor, "heads head_dim embed_dim"]
    wk: Float[Tensor, "heads head_dim source_dim"]
    wv: Float[Tensor, "heads value_dim source_dim"]
    wo: Float[Tensor, "heads out_dim value_dim"]


class Pass(NamedTuple):
    """A forward pass, as far as the gradients need it, and what the loss sends back.

    Attributes:
        x: what queries are projected from.
        source: what keys and values are projected from; ``x`` itself in self-attention.
        q, k, v: the projections, biases included.
        wo: each head's part of the output projection.
        upstream: dL/doutput.
        mask: who may attend.
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


def weight_gradients(forward: Pass) -> WeightGradients:
    """dL/dWq, dL/dWk, dL/dWv and dL/dWo of each head, by the formulas above."""
    x, source, q, k, v, wo, upstream, mask, given = forward
    scale = reference.default_scale(q) if given is None else given
    weights = reference.weights(q, k, mask=mask, scale=scale)
    of_outputs = upstream[:, None] @ wo
    of_weights = of_outputs @ v.mT
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True))
    return WeightGradients(
        wq=_over_tokens(scale * (of_scores @ k), x),
        wk=_over_tokens(scale * (of_scores.mT @ q), source),
        wv=_over_tokens(weights.mT @ of_outputs, source),
        wo=_over_tokens(weights @ v, upstream).mT,
    )


def rounding_bounds(forward: Pass) -> WeightGradients:
    """How far rounding may part two honest computations of these gradients, element by element.

    The floors of `error_budget.rounding` for dq, dk and dv in the dtype of ``q`` (which count
    the rounding of both sides in float64), what the rounding of dO adds to them (they are linear in
    it), and the sum over the tokens. ``q``, ``k`` and ``v`` are taken as they are.
    """
    x, source, q, k, v, wo, upstream = (part.detach().double() for part in forward[:7])
    r = Roundoff.of(forward.q.dtype)
    scale = reference.default_scale(q) if forward.scale is None else forward.scale
    rows = rounding.row_rounding(q, k, r, mask=forward.mask, scale=scale)
    weights = rows.weights
    of_outputs = upstream[:, None] @ wo
    error = (
        r.u * growth(wo.shape[1]) * (upstream.abs()[:, None] @ wo.abs()) + r.U * of_outputs.abs()
    )
    floors = rounding.gradient_floors(rows, q, k, v, of_outputs, scale=scale, bias_gradient=None)
    of_weights, weights_error = of_outputs @ v.mT, error @ v.abs().mT
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True))
    scores_error = weights * (weights_error + (weights * weights_error).sum(-1, keepdim=True))
    outputs_error = rounding.product_floor(rows, v)

    def summed(gradient: Tensor, its_error: Tensor, tokens: Tensor) -> Tensor:
        over = r.u * growth(tokens.shape[0] * tokens.shape[1]) + 2 * r.U  # stored, and the result
        return _over_tokens(its_error + over * gradient.abs(), tokens.abs())

    return WeightGradients(
        wq=summed(scale * of_scores @ k, floors["q"] + abs(scale) * scores_error @ k.abs(), x),
        wk=summed(
            scale * of_scores.mT @ q, floors["k"] + abs(scale) * scores_error.mT @ q.abs(), source
        ),
        wv=summed(weights.mT @ of_outputs, floors["v"] + weights.mT @ error, source),
        wo=summed(weights @ v, outputs_error, upstream).mT,
    )


def _over_tokens(
    gradient: Float[Tensor, "batch heads length width"], tokens: Float[Tensor, "batch length dim"]
) -> Float[Tensor, "heads width dim"]:
    """The gradient of a projection's weight, from that of its outputs and its inputs."""
    return torch.einsum("bhlw,bld->hwd", gradient, tokens)
