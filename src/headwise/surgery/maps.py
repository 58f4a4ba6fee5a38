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

Keys are taken before their rotation. A channel pair that a rotation turns is one complex number,
since the only maps that keep a rotation are factors of such numbers. All other channels of a head
are real numbers that may be mixed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwise.function.spec import AttentionSpec
from headwise.function.weights import State
from headwise.surgery.moments import InputProducts

How = Literal["fitted", "aligned", "mean"]
SWEEPS = 30  # of turns, at most; each one turns every head towards the others
TURNED = 1e-9  # the least change of a matrix that another sweep is for

# ---- channels: how they vary on data, and how much each counts -----------------------------------


@dataclass(frozen=True, eq=False)
class Channels:
    """Channels of n kv heads: p sets of m of them, real or complex."""

    moments: Tensor  # (p, n, n, m, m), the mean of x_i x_j^H over tokens
    weights: Tensor  # (p, n, m, m), the cost of an error: of e in head i it is e^H weights_i e
    # (p, m) real channels of a head; (p, m, 2) for the two parts of complex ones
    places: Int[Tensor, "p m *parts"]

    @property
    def total(self) -> float:
        """The cost of losing all of the channels."""
        each = self.moments.diagonal(dim1=1, dim2=2).movedim(-1, 1)
        return float(torch.einsum("pnab,pnba->", self.weights, each).real)


def key_channels(state: State, spec: AttentionSpec, products: InputProducts) -> list[Channels]:
    """Return the keys of a layer, weighted by the queries that meet them.

    The cost of an error e of a key is the mean of (q^T e)² over the queries of all its heads. What
    all keys have in common changes no weight where nothing turns, and counts nothing there.
    """
    kv_heads = len(state["wk"])
    wq = _with_bias(state, "wq", "bq")
    weights = torch.einsum("hde,ef,hgf->hdg", wq, products.queries, wq)
    weights = weights.unflatten(0, (kv_heads, -1)).sum(1)
    width = 0
    if spec.rotary:
        stated = None if spec.rotation is None else spec.rotation.width
        width = state["wk"].shape[1] if stated is None else int(stated)
    is_free = not width and sums_to_one(state)
    moments = _moments(_with_bias(state, "wk", "bk"), products.source, centred=is_free)
    free = torch.arange(width, moments.shape[-1])
    channels = [_real(moments, weights, free)] if len(free) else []
    if width:  # each pair of channels i and i + width / 2 is a set of one complex number
        half = width // 2
        parts = moments[..., :width, :width].unflatten(-2, (2, half)).unflatten(-1, (2, half))
        planes = parts.diagonal(dim1=-3, dim2=-1).movedim(-1, 0)  # (half, n, n, 2, 2)
        real = planes[..., 0, 0] + planes[..., 1, 1]
        imaginary = planes[..., 1, 0] - planes[..., 0, 1]
        costs = weights.diagonal(dim1=-2, dim2=-1)[..., :width].unflatten(-1, (2, half)).sum(-2)
        pairs = torch.arange(width).unflatten(0, (2, half)).mT
        turned = torch.complex(real, imaginary)[..., None, None]
        of_error = costs.mT[..., None, None].to(torch.complex128) / 2
        channels.append(Channels(turned, of_error, pairs[:, None]))
    return channels


def value_channels(state: State, products: InputProducts) -> list[Channels]:
    """Return the values of a layer, weighted by the output projections that they enter.

    The cost of an error e of a value is the sum of |e^T wo|² over all heads that read it. The mean
    value counts nothing where the output's bias can hold it.
    """
    wo = state["wo"].double()
    weights = (wo @ wo.mT).unflatten(0, (len(state["wv"]), -1)).sum(1)
    centred = has_place_for_means(state)
    moments = _moments(_with_bias(state, "wv", "bv"), products.source, centred=centred)
    return [_real(moments, weights, torch.arange(moments.shape[-1]))]


def mean_values(state: State, products: InputProducts) -> Float[Tensor, "kv_heads value_dim"]:
    """Return the mean value of each kv head."""
    return _with_bias(state, "wv", "bv") @ products.source[:, -1]


def sums_to_one(state: State) -> bool:
    """True if the weights of a query sum to 1 over the tokens."""
    return not {"sink", "extra_k"} & state.keys()


def has_place_for_means(state: State) -> bool:
    """True if a mean value that is lost can go into the output's bias."""
    return "bo" in state and "wg" not in state and sums_to_one(state)


def _with_bias(state: Mapping[str, Tensor], weight: str, bias: str) -> Tensor:
    """Return (heads, channels, inputs + 1) in float64, with the bias as the last input."""
    matrix = state[weight].double()
    last = state[bias].double() if bias in state else matrix.new_zeros(matrix.shape[:2])
    return torch.cat([matrix, last[..., None]], -1)


def _moments(matrix: Tensor, products: Tensor, *, centred: bool) -> Tensor:
    """Return (n, n, d, d): the mean of x_i x_j^T for x = matrix @ input."""
    moments = torch.einsum("ide,ef,jgf->ijdg", matrix, products, matrix)
    if not centred:
        return moments
    mean = matrix @ products[:, -1]
    return moments - torch.einsum("id,jg->ijdg", mean, mean)


def _real(moments: Tensor, weights: Tensor, places: Tensor) -> Channels:
    return Channels(
        moments[..., places, :][..., places][None],
        weights[..., places, :][..., places][None],
        places[None],
    )


def real_maps(
    channels: Sequence[Channels], maps: Sequence[Tensor], width: int
) -> Float[Tensor, "kv_heads channels channels"]:
    """Return maps (p, n, m, m) of each of the channels as one real matrix for each kv head."""
    whole = torch.zeros(maps[0].shape[1], width, width, dtype=torch.float64)
    for each, matrices in zip(channels, maps, strict=True):
        for places, matrix in zip(each.places, matrices, strict=True):
            if not matrix.is_complex():
                whole[:, places[:, None], places] = matrix
                continue
            [[first, second]], factor = places.tolist(), matrix[:, 0, 0]
            whole[:, first, first] = whole[:, second, second] = factor.real
            whole[:, second, first], whole[:, first, second] = factor.imag, -factor.imag
    return whole


# ---- maps of groups of heads ---------------------------------------------------------------------


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
