"""Channels of the keys and values of a layer on data: how they vary, and how much each counts.

Keys are taken before their rotation. A channel pair that a rotation turns is one complex number,
since the only maps that keep a rotation are factors of such numbers. All other channels of a head
are real numbers that may be mixed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwise.function.spec import AttentionSpec
from headwise.function.weights import State
from headwise.surgery.moments import InputProducts


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
    return [*channels, _complex(moments, weights, width)] if width else channels


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


def _complex(moments: Tensor, weights: Tensor, width: int) -> Channels:
    """Return each pair of channels i and i + width / 2 as a set of one complex number."""
    half = width // 2
    parts = moments[..., :width, :width].unflatten(-2, (2, half)).unflatten(-1, (2, half))
    planes = parts.diagonal(dim1=-3, dim2=-1).movedim(-1, 0)  # (half, n, n, 2, 2)
    real = planes[..., 0, 0] + planes[..., 1, 1]
    imaginary = planes[..., 1, 0] - planes[..., 0, 1]
    cost = weights.diagonal(dim1=-2, dim2=-1)[..., :width].unflatten(-1, (2, half)).sum(-2)
    pairs = torch.arange(width).unflatten(0, (2, half)).mT
    return Channels(
        torch.complex(real, imaginary)[..., None, None],
        cost.mT[..., None, None].to(torch.complex128) / 2,
        pairs[:, None],
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
