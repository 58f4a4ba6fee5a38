"""Implementations of attention under the same weights, each against the float64 reference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headwise.bundled_models.recorded_run import Projections, RecordedRun
from headwise.error_budget.budget import Budget
from headwise.masks.mask import Mask
from headwise.study.experiments.measures import layer_budget
from headwise.study.implementation import Implementation, SharedWeights
from headwise.study.implementations import IMPLEMENTATIONS, Bert, EinopsPage

BATCH, NUM_HEADS, LENGTH, EMBED_DIM = 3, 6, 45, 192


def budget(
    x: Float[Tensor, "batch length embed_dim"],
    given: SharedWeights,
    *,
    num_heads: int = NUM_HEADS,
    may_attend: Bool[Tensor, "batch queries keys"] | None = None,
) -> Budget:
    """What rounding may do to the output of these weights."""
    mask = None if may_attend is None else Mask.may_attend(may_attend, axes="batch queries keys")
    return layer_budget(x, x, x, given, num_heads=num_heads, mask=mask)


def made(
    keys: Iterable[str] = tuple(IMPLEMENTATIONS),
    *,
    biased: bool = False,
    embed_dim: int = EMBED_DIM,
    num_heads: int = NUM_HEADS,
) -> dict[str, Implementation]:
    """These implementations, or those with biases alone, to be filled."""
    return {
        key: IMPLEMENTATIONS[key](embed_dim, num_heads).eval()
        for key in keys
        if IMPLEMENTATIONS[key].biased or not biased
    }


@torch.no_grad()
def outputs(
    peers: Mapping[str, Implementation],
    x: Tensor,
    given: SharedWeights,
    may_attend: Tensor | None = None,
) -> dict[str, Tensor]:
    """What each gives, with the mask in its own values."""
    return {
        key: peer.fill(given)(x, None if may_attend is None else peer.spell(may_attend))
        for key, peer in peers.items()
    }


def shares(allowed: Budget, found: Mapping[str, Tensor]) -> dict[str, float]:
    """The largest error of each, in parts of what is allowed there."""
    return {key: allowed.check(output).ratio for key, output in found.items()}


def differences(rows: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> list[list[float]]:
    """The largest difference between any two outputs."""
    return [[float((a - b).abs().max()) for b in columns.values()] for a in rows.values()]


def each_pair_within(allowed: Budget, found: Mapping[str, Tensor]) -> bool:
    """Whether any two differ by no more than both together may be off, at every element."""
    pairs = combinations((output.double() for output in found.values()), 2)
    return all(bool(((a - b).abs() <= 2 * allowed.allowed).all()) for a, b in pairs)


def misread(given: SharedWeights) -> dict[str, SharedWeights]:
    """The same numbers, taken for something else, as happens when weights are ported.

    All matrices are square: nothing raises.
    """
    q, k, v, out = given.matrices
    by_head = (w.unflatten(0, (-1, NUM_HEADS)).transpose(0, 1).flatten(0, 1) for w in (q, k, v))
    return {
        "transposed": SharedWeights(q, k, v, out.mT),
        "exchanged": SharedWeights(k, q, v, out),
        "interleaved": SharedWeights.of((*by_head, out)),
        "scale": SharedWeights(q / math.sqrt(NUM_HEADS), k, v, out),
    }


def of_projections(p: Projections) -> SharedWeights:
    """The weights of a model's attention layer."""
    return SharedWeights.packed(
        p.in_proj_weight, p.in_proj_bias, p.out_proj_weight, p.out_proj_bias
    )


def of_a_model(
    reading: RecordedRun, keys: Iterable[str] = tuple(IMPLEMENTATIONS)
) -> dict[str, float]:
    """The weights and tokens of every layer of an encoder, which has biases and padding.

    Returns the largest share of each implementation over the layers, and of the encoder itself.
    """
    embed_dim = reading.calls[0].x.shape[-1]
    peers = made(keys, biased=True, embed_dim=embed_dim, num_heads=reading.num_heads)
    may_attend = reading.real[:, None].expand(-1, reading.real.shape[1], -1)
    largest: dict[str, float] = {}
    for call in reading.calls:
        given = of_projections(call.projections)
        found = outputs(peers, call.x, given, may_attend) | {"encoder": call.output}
        allowed = budget(call.x, given, num_heads=reading.num_heads, may_attend=may_attend)
        for key, share in shares(allowed, found).items():
            largest[key] = max(share, largest.get(key, 0.0))
    return largest


@dataclass(frozen=True)
class SameFunction:
    """Whether headwise's layers, filled with a model's weights, give what its own layers give.

    Attributes:
        model: the model's name.
        layers: how many attention layers it has.
        shares: the largest share of the error budget over the layers, by the layer's name; the
            model's own is among them.
    """

    model: str
    layers: int
    shares: Mapping[str, float]

    @property
    def holds(self) -> bool:
        """True if every layer is within the error budget."""
        return max(self.shares.values()) <= 1

    @property
    def says(self) -> str:
        """The result and its figures, in three sentences."""
        *ours, own = self.shares
        verdict = (
            f"The same function. In all {self.layers} layers"
            if self.holds
            else f"Not the same function. In at least one of {self.layers} layers not all of"
        )
        shares = ", ".join(f"{name} {share:.2f}" for name, share in self.shares.items())
        return (
            f"{verdict} {' and '.join(ours)} with the weights of {self.model}, and {own}, are "
            f"within the error budget of the formula. The largest shares of it: {shares}."
        )


def same_function(reading: RecordedRun) -> SameFunction:
    """Fill both layers of headwise with the weights of each layer, and compare the outputs."""
    shares = of_a_model(reading, keys=("drop_in", "native"))
    names = {key: make.name for key, make in IMPLEMENTATIONS.items()}
    names["encoder"] = "the model's own layers"
    return SameFunction(
        reading.model, len(reading.calls), {names[key]: share for key, share in shares.items()}
    )


def of_random_weights() -> dict[str, Any]:
    """All under the same random weights: without a mask, masked, biased, in float64, misread.

    Masked: no query sees a later key, nor, in the second sequence, a key of the last third.
    """
    x = torch.randn(BATCH, LENGTH, EMBED_DIM)
    mask = torch.ones(BATCH, LENGTH, LENGTH, dtype=torch.bool).tril()
    mask[1, :, 2 * LENGTH // 3 :] = False
    plain, biased = SharedWeights.random(EMBED_DIM), SharedWeights.random(EMBED_DIM, biased=True)
    peers = made()
    found = outputs(peers, x, plain)
    allowed = budget(x, plain)
    share = {
        "plain": shares(allowed, found),
        "masked": shares(budget(x, plain, may_attend=mask), outputs(peers, x, plain, mask)),
        "biased": shares(
            budget(x, biased, may_attend=mask), outputs(made(biased=True), x, biased, mask)
        ),
    }
    wrong = {
        how: outputs({"torch": peers["torch"]}, x, given)["torch"]
        for how, given in misread(plain).items()
    }
    wide = {key: peer.double() for key, peer in peers.items()}
    fine = shares(budget(x.double(), plain.double()), outputs(wide, x.double(), plain))
    pairs = differences(found, found)
    return {
        "pairs": pairs,
        "each_pair_within": each_pair_within(allowed, found),
        "largest_pair": max(map(max, pairs)),
        "typical_output": float(allowed.exact.std()),
        "allowed": float(allowed.allowed.max()),
        "share": share,
        "largest_share": {name: max(each.values()) for name, each in share.items()},
        "misread_pairs": differences(wrong, found),
        "misread_share": (misread_share := shares(allowed, wrong)),
        "least_misread_share": min(misread_share.values()),
        "outside_in_float64": [key for key, used in fine.items() if used > 1],
    }


@torch.no_grad()
def blocks_are_sums() -> bool:
    """Whether the blocks with a residual and a norm inside are just these around the attention."""
    x, given = torch.randn(BATCH, LENGTH, EMBED_DIM), SharedWeights.random(EMBED_DIM, biased=True)
    einops, bert = EinopsPage(EMBED_DIM, NUM_HEADS), Bert(EMBED_DIM, NUM_HEADS)
    norms = {einops: einops.layer_norm, bert: bert.inner.output.LayerNorm}
    return all(
        torch.equal(peer.fill(given).eval().block(x), norm(peer(x) + x))
        for peer, norm in norms.items()
    )
