"""The formula of a whole layer, head by head, and how far rounding may take a layer from it.

Attention Is All You Need (arXiv:1706.03762) section 3.2.2: each head has matrices of its own, and
no size has to divide another.

The budget is `Budget`'s: twice the error that plain torch makes over a family of inputs, and a
floor for what it may make by bad luck alone. Between projections the floor is that of
`headwise.budget.rounding`. A projection sums n products p. Each partial sum is rounded, by at most
u of it, and is about |y| + |p| in size: y is the result, |p| the root of the sum of squares, since
products of mixed signs cancel on the way as they do in the end. n such errors, independent, have a
root mean square of sqrt(n) u (|y| + |p|), of which LAMBDA are granted, as in
`headwise.budget.rounding`. Errors that pass through a later sum add up by their squares, as
independent ones do.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from headwise import reference
from headwise.budget import rounding
from headwise.budget.budget import Budget
from headwise.budget.rounding import LAMBDA, Roundoff
from headwise.masks.mask import Mask
from headwise.studies.peers.peer import Weights


def output(
    x: Float[Tensor, "batch queries embed_dim"],
    keys: Float[Tensor, "batch keys source_dim"],
    values: Float[Tensor, "batch keys value_source"],
    *weights: Tensor,
    num_heads: int,
    mask: Mask | None = None,
) -> Float[Tensor, "batch queries out_dim"]:
    """Queries are projected from ``x``, keys and values each from their own; `Weights.tensors`."""
    (wq, wk, wv, wo), biases = weights[:4], weights[4:] or (None,) * 4
    inputs = ((x, wq, biases[0]), (keys, wk, biases[1]), (values, wv, biases[2]))
    per_head = zip(*(_of_each_head(*each, num_heads=num_heads) for each in inputs), strict=True)
    outputs = [reference.head_outputs(q, k, v, mask=mask) for q, k, v in per_head]
    return F.linear(torch.cat(outputs, -1).squeeze(1), wo, biases[3])


def _of_each_head(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, num_heads: int
) -> list[Float[Tensor, "batch 1 length head_dim"]]:
    biases = [None] * num_heads if bias is None else bias.chunk(num_heads)
    rows = zip(weight.chunk(num_heads), biases, strict=True)
    return [F.linear(x, own, own_bias)[:, None] for own, own_bias in rows]


def budget(
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    weights: Weights,
    *,
    num_heads: int,
    mask: Mask | None = None,
) -> Budget:
    """The formula in float64, and what an honest layer may be off, element by element."""
    tensors = tuple(t.detach() for t in weights.tensors)
    formula = partial(output, num_heads=num_heads, mask=mask)
    floor = _floor((x, keys, values), tensors, num_heads, mask)
    return Budget.of(formula, x, keys, values, *tensors, floor=floor, name="output")


def _floor(
    inputs: tuple[Tensor, ...], weights: tuple[Tensor, ...], num_heads: int, mask: Mask | None
) -> Tensor:
    r = Roundoff.of(inputs[0].dtype)
    matrices, biases = weights[:4], weights[4:] or (None,) * 4
    found = [
        [reference.split_heads(t, heads=num_heads) for t in _projected(each, matrix, bias, r)]
        for each, matrix, bias in zip(inputs, matrices[:3], biases[:3], strict=True)
    ]
    (q, q_error), (k, k_error), (v, v_error) = found
    rows = rounding.rows(q, k, r, mask=mask)
    # Errors of q and k reach all scores of a row alike: they are averaged over it, not squared.
    squares = reference.scores(q_error**2, k**2, scale=1.0) + reference.scores(
        q**2, k_error**2, scale=1.0
    )
    of_scores = reference.default_scale(q) * squares.sqrt()
    of_row = (rows.weights * of_scores).sum(-1, keepdim=True)
    rows = replace(
        rows, score_error=rows.score_error + of_scores, mean_error=rows.mean_error + of_row
    )
    of_outputs = rounding.product_floor(rows, v) + (rows.weights**2 @ v_error**2).sqrt()
    merged = reference.merge_heads(rows.weights @ v)
    passed_on = (reference.merge_heads(of_outputs) ** 2 @ (matrices[3].double() ** 2).mT).sqrt()
    return _projected(merged, matrices[3], biases[3], r)[1] + passed_on


def _projected(
    x: Tensor, weight: Tensor, bias: Tensor | None, r: Roundoff
) -> tuple[Tensor, Tensor]:
    """A projection in float64, and what is granted to the rounding of its sums."""
    x, weight = x.double(), weight.double()
    y = F.linear(x, weight, None if bias is None else bias.double())
    size = y.abs() + F.linear(x**2, weight**2, None if bias is None else bias.double() ** 2).sqrt()
    return y, LAMBDA * math.sqrt(weight.shape[1] + 1) * r.u * size
