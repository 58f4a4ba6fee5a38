"""What several questions measure: sizes, times, differences, and how far rounding may take a layer.

The budget of a layer is `Budget`'s: twice the error that plain torch makes over a family of inputs,
and a floor for what it may make by bad luck alone. Between projections the floor is that of
`headwise.error_budget.rounding`. A projection sums n products p. Each partial sum is rounded, by at
most u of it, and is about |y| + |p| in size: y is the result, |p| the root of the sum of squares,
since products of mixed signs cancel on the way as they do in the end. n such errors, independent,
have a root mean square of sqrt(n) u (|y| + |p|), of which LAMBDA are granted, as in
`headwise.error_budget.rounding`. Errors that pass through a later sum add up by their squares, as
independent ones do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from headwise import reference
from headwise.error_budget import rounding
from headwise.error_budget.budget import Budget
from headwise.error_budget.rounding import LAMBDA, Roundoff
from headwise.masks.mask import Mask
from headwise.study.implementation import SharedWeights
from headwise.support.thread_count import one_thread


def parameters(layer: nn.Module) -> int:
    """How many numbers a layer learns."""
    return sum(p.numel() for p in layer.parameters())


def times_of(
    works: Mapping[str, Callable[[], object]], *, against: str, rounds: int
) -> dict[str, float]:
    """How many times as long each takes as the one that is named: the median over the rounds.

    All run in every round, in turn forwards and backwards, so that a busy machine is busy for
    all of them; and on one thread, since several would wait for the one that was disturbed.
    """
    ratios: dict[str, list[float]] = {name: [] for name in works}
    with one_thread():
        for work in works.values():  # the first call is not like the others
            work()
        for count in range(rounds):
            taken = {}
            for name in list(works)[:: -1 if count % 2 else 1]:
                start = time.perf_counter()
                works[name]()
                taken[name] = time.perf_counter() - start
            for name, seconds in taken.items():
                ratios[name].append(seconds / taken[against])
    return {name: median(found) for name, found in ratios.items()}


# ---- a whole layer -----------------------------------------------------------------------------


def layer_output(
    x: Float[Tensor, "batch queries embed_dim"],
    keys: Float[Tensor, "batch keys source_dim"],
    values: Float[Tensor, "batch keys value_source"],
    *weights: Tensor,
    num_heads: int,
    mask: Mask | None = None,
) -> Float[Tensor, "batch queries out_dim"]:
    """The formula of a whole layer, head by head, of `SharedWeights.tensors`.

    Queries are projected from ``x``, keys and values each from their own. Attention Is All You Need
    (arXiv:1706.03762) section 3.2.2: each head has matrices of its own, and no size has to divide
    another.
    """
    (wq, wk, wv, wo), biases = weights[:4], weights[4:] or (None,) * 4
    projected = []
    for tokens, weight, bias in zip((x, keys, values), (wq, wk, wv), biases[:3], strict=True):
        own_biases = [None] * num_heads if bias is None else bias.chunk(num_heads)
        rows = zip(weight.chunk(num_heads), own_biases, strict=True)
        projected.append([F.linear(tokens, own, own_bias)[:, None] for own, own_bias in rows])
    per_head = zip(*projected, strict=True)
    outputs = [reference.head_outputs(q, k, v, mask=mask) for q, k, v in per_head]
    return F.linear(torch.cat(outputs, -1).squeeze(1), wo, biases[3])


def layer_budget(
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    weights: SharedWeights,
    *,
    num_heads: int,
    mask: Mask | None = None,
) -> Budget:
    """The formula in float64, and what an honest layer may be off, element by element."""
    tensors = tuple(t.detach() for t in weights.tensors)
    formula = partial(layer_output, num_heads=num_heads, mask=mask)
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
    rows = rounding.row_rounding(q, k, r, mask=mask)
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


# ---- one head against several, given the same queries, keys and values --------------------------


@dataclass(frozen=True, eq=False)
class Projected:
    """Queries, keys and values that one head may read, or several."""

    q: Float[Tensor, "batch queries embed_dim"]
    k: Float[Tensor, "batch keys embed_dim"]
    v: Float[Tensor, "batch keys embed_dim"]

    def split(self, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Each head's own, (batch, heads, length, head_dim)."""
        projections = (self.q, self.k, self.v)
        q, k, v = (reference.split_heads(p, heads=heads) for p in projections)
        return q, k, v

    def scores(self, heads: int) -> Float[Tensor, "batch {heads} queries keys"]:
        """What goes into the softmax."""
        return reference.scores(*self.split(heads)[:2])

    def weights(self, heads: int) -> Float[Tensor, "batch {heads} queries keys"]:
        """How much each query takes of each key."""
        return reference.weights(*self.split(heads)[:2])

    def outputs(self, heads: int) -> Float[Tensor, "batch queries embed_dim"]:
        """The head outputs concatenated, as the output projection takes them."""
        return reference.merge_heads(reference.head_outputs(*self.split(heads)))


def difference(
    actual: Float[Tensor, "batch *rest"], reference: Float[Tensor, "batch *rest"]
) -> Float[Tensor, " batch"]:
    """The relative difference: the norm of the difference over the norm of the reference."""
    actual, reference = (x.detach().double().flatten(1) for x in (actual, reference))
    apart: Tensor = torch.linalg.vector_norm(actual - reference, dim=1)
    size: Tensor = torch.linalg.vector_norm(reference, dim=1)
    return apart / size


def merged_scores(
    scores: Float[Tensor, "batch heads queries keys"],
) -> Float[Tensor, "batch 1 queries keys"]:
    """The single head's scores from those of several: their sum over the root of their number.

    The single q.k is the sum of the heads', and is divided by a root that is as much larger.
    """
    return scores.sum(1, keepdim=True) / math.sqrt(scores.shape[1])


def budget_of_scores(projected: Projected) -> Budget:
    """The error budget of the scores of a single head."""
    q, k, _ = projected.split(1)
    floor = rounding.row_rounding(q, k, Roundoff.of(q.dtype)).score_error
    return Budget.of(reference.scores, q, k, floor=floor, name="scores")


def excess(actual: Float[Tensor, "*shape"], budget: Budget) -> Float[Tensor, "*shape"]:
    """Error over allowance of every element: above 1, it is no rounding."""
    error = (actual.detach().double() - budget.exact).abs()
    return (error / budget.allowed).where(error > 0, 0.0)


def reads_one_key(
    outputs: Float[Tensor, "batch queries embed_dim"],
    v: Float[Tensor, "batch keys embed_dim"],
    favourites: Int[Tensor, "batch heads queries"],
) -> Bool[Tensor, "batch heads queries"]:
    """Whether a head's output is, bit by bit, the value of the key it prefers."""
    heads = favourites.shape[1]
    values = reference.split_heads(v, heads=heads).take_along_dim(favourites[..., None], dim=2)
    return (reference.split_heads(outputs, heads=heads) == values).all(-1)
