"""Maps that make one kv head of several, and the maps that read the old ones from it.

With the channels x_j of head j, the new head is M = Σ F_j x_j, and B_j M stands in for x_j. Queries
and output projections of head j are multiplied by B_j^H.

    mean     F_j = 1/n, B_j = 1, as in GQA (arXiv:2305.13245), section 2.1
    aligned  F_j = T_j/n, B_j = T_j^H: the mean after a turn T_j of each head towards the others
             (generalised Procrustes analysis, Gower 1975), as in arXiv:2412.20677
    fitted   the maps with the least cost of B_j M - x_j

The least cost is that of principal components (Eckart and Young 1936): with W_j the root of the
weights of head j, and U_j the rows of head j in the first m principal directions of all W_j x_j
together, F_j = U_j^H W_j and B_j = W_j^-1 U_j.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from headwise.surgery.channels import Channels

How = Literal["fitted", "aligned", "mean"]
SWEEPS = 30  # of turns, at most; each one turns every head towards the others
TURNED = 1e-9  # the least change of a matrix that another sweep is for


class Maps(NamedTuple):
    """Maps of groups of n kv heads, (..., n, m, m) each: F to the new head, B back."""

    to: Tensor
    back: Tensor


class Group(NamedTuple):
    """Channels of groups of n kv heads: moments (..., n, n, m, m) and weights (..., n, m, m)."""

    moments: Tensor
    weights: Tensor

    @property
    def joined(self) -> Tensor:
        """Moments of all channels of a group together, (..., n m, n m)."""
        return _join(self.moments)


def _join(blocks: Tensor) -> Tensor:
    """Return blocks (..., n, n, m, m) as one matrix (..., n m, n m)."""
    return blocks.transpose(-3, -2).flatten(-4, -3).flatten(-2, -1)


def select(channels: Channels, heads: Tensor) -> Group:
    """Return groups of kv heads (groups, n), each of all p sets: (p, groups, n, ...)."""
    moments = channels.moments[:, heads[:, :, None], heads[:, None, :]]
    return Group(moments, channels.weights[:, heads])


def fit(group: Group, how: How) -> Maps:
    """Return the maps of each group."""
    return WAYS[how](group)


def cost(group: Group, maps: Maps) -> Tensor:
    """Return the mean cost of the error of each group, (...)."""
    count, channels = group.weights.shape[-3], group.weights.shape[-1]
    back = maps.back.flatten(-3, -2)  # (..., n m, m)
    to = maps.to.transpose(-3, -2).flatten(-2, -1)  # (..., m, n m)
    error = back @ to - torch.eye(count * channels).to(back)
    left = error @ group.joined @ error.mH
    blocks = left.unflatten(-2, (count, channels)).unflatten(-1, (count, channels))
    each = blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)  # (..., n, m, m)
    return torch.einsum("...nab,...nba->...", group.weights, each).real


def _mean(group: Group) -> Maps:
    unit = torch.eye(group.weights.shape[-1]).to(group.weights).expand_as(group.weights)
    return Maps(unit / unit.shape[-3], unit)


def _aligned(group: Group) -> Maps:
    turns = _mean(group).back.clone()
    count = turns.shape[-3]
    for _ in range(SWEEPS):
        before = turns.clone()
        for j in range(count):
            others = [i for i in range(count) if i != j]
            towards = group.moments[..., j, others, :, :] @ turns[..., others, :, :].mH
            left, _, right = torch.linalg.svd(towards.sum(-3))
            turns[..., j, :, :] = (left @ right).mH
        if (turns - before).abs().max() < TURNED:
            break
    return Maps(turns / count, turns.mH)


def _fitted(group: Group) -> Maps:
    values, vectors = torch.linalg.eigh(group.weights)
    # Directions that nothing reads have the weight 0, up to rounding.
    least = values.amax(-1, keepdim=True) * values.shape[-1] * torch.finfo(values.dtype).eps
    is_read = values > least
    roots = values.clamp(min=0).sqrt()
    inverses = torch.where(is_read, roots.clamp(min=torch.finfo(roots.dtype).tiny) ** -1, 0.0)
    root = (vectors * roots[..., None, :]) @ vectors.mH
    inverse = (vectors * inverses[..., None, :]) @ vectors.mH
    weighted = root[..., :, None, :, :] @ group.moments @ root[..., None, :, :, :]
    count, channels = root.shape[-3], root.shape[-1]
    first = torch.linalg.eigh(_join(weighted))[1][..., -channels:]
    parts = first.unflatten(-2, (count, channels))  # U_j, (..., n, m, m)
    return Maps(parts.mH @ root, inverse @ parts)


WAYS: dict[How, Callable[[Group], Maps]] = {"mean": _mean, "aligned": _aligned, "fitted": _fitted}
