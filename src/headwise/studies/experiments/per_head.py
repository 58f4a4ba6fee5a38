"""The paper's formula head by head, and how far rounding may take a layer from it.

Attention Is All You Need (arXiv:1706.03762) section 3.2.2: each head has matrices of its own, and
no size has to divide another.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise import functional, rounding
from headwise.budget import Budget
from headwise.rounding import Roundoff


class Weights(NamedTuple):
    """The four projections of a layer, the heads' rows one after the other, and their biases."""

    wq: Tensor
    wk: Tensor
    wv: Tensor
    wo: Tensor
    bq: Tensor
    bk: Tensor
    bv: Tensor
    bo: Tensor

    @classmethod
    def of(cls, q: nn.Linear, k: nn.Linear, v: nn.Linear, out: nn.Linear) -> Weights:
        """Those of four linear projections."""
        projections = (q, k, v, out)
        weights = [p.weight.detach() for p in projections]
        return cls(*weights, *(p.bias.detach() for p in projections))


def per_head(x: Tensor, keys: Tensor, values: Tensor, *weights: Tensor, heads: int) -> Tensor:
    """The output for queries from ``x``; keys and values may have inputs of their own.

    Args:
        x: (batch, queries, width).
        keys: (batch, keys, width of its own).
        values: (batch, keys, width of its own).
        weights: in the order of `Weights`.
        heads: how many.
    """
    w = Weights(*weights)
    rows = (p.chunk(heads) for p in (w.wq, w.bq, w.wk, w.bk, w.wv, w.bv))
    outputs = []
    for wq, bq, wk, bk, wv, bv in zip(*rows, strict=True):
        q, k, v = F.linear(x, wq, bq), F.linear(keys, wk, bk), F.linear(values, wv, bv)
        scores = q @ k.mT / wq.shape[0] ** 0.5
        outputs.append(torch.softmax(scores, -1) @ v)
    return F.linear(torch.cat(outputs, -1), w.wo, w.bo)


def budget(x: Tensor, keys: Tensor, values: Tensor, weights: Weights, *, heads: int) -> Budget:
    """The formula in float64, and what an honest layer may be off, element by element."""
    floor = rounding_floor(x, keys, values, weights, heads=heads)
    formula = partial(per_head, heads=heads)
    return Budget.of(formula, x, keys, values, *weights, floor=floor, name="output")


def rounding_floor(
    x: Tensor, keys: Tensor, values: Tensor, weights: Weights, *, heads: int
) -> Tensor:
    """To first order: each projection rounds, and its error goes through what follows.

    An error of q or k becomes one of the scores; one of a score goes through the softmax, as in
    `headwise.rounding`; one of v or of a head's output is averaged, or projected.
    """
    r = Roundoff.of(x.dtype)
    w = Weights(*(p.double() for p in weights))
    (q, q_error), (k, k_error), (v, v_error) = (
        (functional.split_heads(exact, heads=heads), functional.split_heads(error, heads=heads))
        for exact, error in (
            _projected(x.double(), w.wq, w.bq, r),
            _projected(keys.double(), w.wk, w.bk, r),
            _projected(values.double(), w.wv, w.bv, r),
        )
    )
    of_scores = functional.scores(q_error, k.abs()) + functional.scores(q.abs(), k_error)
    rows = rounding.rows(q, k, r)
    of_row = (rows.weights * of_scores).sum(-1, keepdim=True)
    rows = replace(
        rows, score_error=rows.score_error + of_scores, mean_error=rows.mean_error + of_row
    )
    of_outputs = rounding.product_floor(rows, v) + rows.weights @ v_error
    merged = functional.merge_heads(rows.weights @ v)
    return _projected(merged, w.wo, w.bo, r)[1] + functional.merge_heads(of_outputs) @ w.wo.abs().mT


def _projected(x: Tensor, weight: Tensor, bias: Tensor, r: Roundoff) -> tuple[Tensor, Tensor]:
    """A projection, and the rounding of its sums."""
    size = F.linear(x.abs(), weight.abs(), bias.abs())
    return F.linear(x, weight, bias), r.u * rounding.growth(weight.shape[1] + 1) * size
