"""One head against several that are given the same queries, keys and values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise import reference
from headwise.budget import rounding
from headwise.budget.budget import Budget
from headwise.budget.rounding import Roundoff


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
    floor = rounding.rows(q, k, Roundoff.of(q.dtype)).score_error
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
