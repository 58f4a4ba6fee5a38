"""One head against several that are given the same queries, keys and values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise import functional, rounding
from headwise.budget import Budget
from headwise.rounding import Roundoff


@dataclass(frozen=True, eq=False)
class Projected:
    """Queries, keys and values that one head may read, or several."""

    q: Float[Tensor, "batch queries embed_dim"]
    k: Float[Tensor, "batch keys embed_dim"]
    v: Float[Tensor, "batch keys embed_dim"]

    def split(self, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Each head's own, (batch, heads, length, head_dim)."""
        return split(self.q, heads), split(self.k, heads), split(self.v, heads)

    def scores(self, heads: int) -> Float[Tensor, "batch {heads} queries keys"]:
        """What goes into the softmax."""
        return functional.scores(*self.split(heads)[:2])

    def weights(self, heads: int) -> Float[Tensor, "batch {heads} queries keys"]:
        """How much each query takes of each key."""
        return functional.weights(*self.split(heads)[:2])

    def outputs(self, heads: int) -> Float[Tensor, "batch queries embed_dim"]:
        """The head outputs side by side, as the output projection takes them."""
        return side_by_side(functional.head_outputs(*self.split(heads)))


def split(
    x: Float[Tensor, "batch length embed_dim"], heads: int
) -> Float[Tensor, "batch {heads} length head_dim"]:
    """Give each head its part of a projection."""
    parts: Tensor = x.unflatten(-1, (heads, -1))
    return parts.transpose(1, 2)


def side_by_side(
    outputs: Float[Tensor, "batch heads queries value_dim"],
) -> Float[Tensor, "batch queries embed_dim"]:
    """Put the head outputs next to each other."""
    return outputs.transpose(1, 2).flatten(2)


def difference(
    one: Float[Tensor, "batch *rest"], several: Float[Tensor, "batch *rest"]
) -> Float[Tensor, " batch"]:
    """How far the two are apart, as a share of the size of the second: norm over norm."""
    one, several = (x.detach().double().flatten(1) for x in (one, several))
    apart: Tensor = torch.linalg.vector_norm(one - several, dim=1)
    size: Tensor = torch.linalg.vector_norm(several, dim=1)
    return apart / size


def merged_scores(
    scores: Float[Tensor, "batch heads queries keys"],
) -> Float[Tensor, "batch 1 queries keys"]:
    """The single head's scores from those of several: their sum over the root of their number.

    The single q.k is the sum of the heads', and is divided by a root that is as much larger.
    """
    return scores.sum(1, keepdim=True) / math.sqrt(scores.shape[1])


def budget_of_scores(projected: Projected) -> Budget:
    """What rounding may do to the scores of a single head."""
    q, k, _ = projected.split(1)
    floor = rounding.rows(q, k, Roundoff.of(q.dtype)).score_error
    return Budget.of(functional.scores, q, k, floor=floor, name="scores")


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
    values = split(v, heads).take_along_dim(favourites[..., None], dim=2)
    return (split(outputs, heads) == values).all(-1)
