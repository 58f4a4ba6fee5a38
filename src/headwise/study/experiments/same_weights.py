"""Comparison of attention implementations under the same weights with a float64 reference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headwise.function.budget import Budget
from headwise.masks.mask import Mask
from headwise.reports.report import SameFunction
from headwise.study.encoder import RecordedRun
from headwise.study.experiments.measures import layer_error_budget, name_cause
from headwise.study.implementations import (
    IMPLEMENTATIONS,
    Bert,
    EinopsPage,
    Implementation,
    SharedWeights,
)

BATCH, NUM_HEADS, LENGTH, EMBED_DIM = 3, 6, 45, 192


def output_error_budget(
    x: Float[Tensor, "batch length embed_dim"],
    weights: SharedWeights,
    *,
    num_heads: int = NUM_HEADS,
    may_attend: Bool[Tensor, "batch queries keys"] | None = None,
) -> Budget:
    """Return the error budget of the output under these weights."""
    mask = None if may_attend is None else Mask.may_attend(may_attend, axes="batch queries keys")
    return layer_error_budget(x, x, x, weights, num_heads=num_heads, mask=mask)


def make_implementations(
    keys: Iterable[str] = tuple(IMPLEMENTATIONS),
    *,
    biased: bool = False,
    embed_dim: int = EMBED_DIM,
    num_heads: int = NUM_HEADS,
) -> dict[str, Implementation]:
    """Make these implementations; with ``biased``, only those that have biases."""
    return {
        key: IMPLEMENTATIONS[key](embed_dim, num_heads).eval()
        for key in keys
        if IMPLEMENTATIONS[key].biased or not biased
    }


@torch.no_grad()
def compute_outputs(
    implementations: Mapping[str, Implementation],
    x: Tensor,
    weights: SharedWeights,
    may_attend: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the output of each implementation, with the mask in its values."""
    return {
        key: implementation.load_weights(weights)(
            x, None if may_attend is None else implementation.convert_mask(may_attend)
        )
        for key, implementation in implementations.items()
    }


def budget_share_of_each_output(allowed: Budget, outputs: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the largest error of each output as a share of the error budget."""
    return {key: allowed.check(output).ratio for key, output in outputs.items()}


def largest_differences(
    rows: Mapping[str, Tensor], columns: Mapping[str, Tensor]
) -> list[list[float]]:
    """Return the largest difference between each pair of outputs."""
    return [[float((a - b).abs().max()) for b in columns.values()] for a in rows.values()]


def all_pairs_agree(allowed: Budget, outputs: Mapping[str, Tensor]) -> bool:
    """Check that any two outputs differ by at most twice the allowed error, at every element."""
    pairs = combinations((output.double() for output in outputs.values()), 2)
    return all(bool(((a - b).abs() <= 2 * allowed.allowed).all()) for a, b in pairs)


def make_misread_weights(weights: SharedWeights) -> dict[str, SharedWeights]:
    """Return the same numbers misread in four ways, as happens when weights are ported.

    All matrices are square, so no shape error shows the mistake.
    """
    q, k, v, out = weights.matrices
    by_head = (w.unflatten(0, (-1, NUM_HEADS)).transpose(0, 1).flatten(0, 1) for w in (q, k, v))
    return {
        "transposed": SharedWeights(q, k, v, out.mT),
        "exchanged": SharedWeights(k, q, v, out),
        "interleaved": SharedWeights.of_matrices((*by_head, out)),
        "scale": SharedWeights(q / math.sqrt(NUM_HEADS), k, v, out),
    }


def named_causes_of_misread_weights(weights: SharedWeights) -> dict[str, str]:
    """Return the cause that `headwise.compare` names for each way to misread the weights."""
    right = make_implementations(["torch"])["torch"].load_weights(weights).inner
    wrong = make_implementations(["torch"])["torch"]
    return {
        how: name_cause(wrong.load_weights(misread).inner, right)
        for how, misread in make_misread_weights(weights).items()
    }


def error_budget_shares_over_layers(
    run: RecordedRun, keys: Iterable[str] = tuple(IMPLEMENTATIONS)
) -> dict[str, float]:
    """Return the largest budget share of each implementation over the layers of an encoder.

    Weights, tokens and padding are those of each layer. The encoder's own outputs are included.
    """
    embed_dim = run.calls[0].x.shape[-1]
    implementations = make_implementations(
        keys, biased=True, embed_dim=embed_dim, num_heads=run.num_heads
    )
    may_attend = run.real[:, None].expand(-1, run.real.shape[1], -1)
    largest: dict[str, float] = {}
    for call in run.calls:
        outputs = compute_outputs(implementations, call.x, call.weights, may_attend)
        outputs["encoder"] = call.output
        allowed = output_error_budget(
            call.x, call.weights, num_heads=run.num_heads, may_attend=may_attend
        )
        for key, share in budget_share_of_each_output(allowed, outputs).items():
            largest[key] = max(share, largest.get(key, 0.0))
    return largest


def compare_with_model_layers(run: RecordedRun) -> SameFunction:
    """Load each layer's weights into both layers of headwise, and compare the outputs."""
    shares = error_budget_shares_over_layers(run, keys=("drop_in", "native"))
    names = {key: make.name for key, make in IMPLEMENTATIONS.items()}
    names["encoder"] = "the model's own layers"
    return SameFunction(
        run.model,
        len(run.calls),
        {names[key]: share for key, share in shares.items()},
    )


def compare_random_weights() -> dict[str, Any]:
    """Compare all implementations under random weights: plain, masked, biased, float64, misread.

    The mask is causal, and also hides the last third of the keys in the second sequence.
    """
    x = torch.randn(BATCH, LENGTH, EMBED_DIM)
    mask = torch.ones(BATCH, LENGTH, LENGTH, dtype=torch.bool).tril()
    mask[1, :, 2 * LENGTH // 3 :] = False
    plain, biased = SharedWeights.random(EMBED_DIM), SharedWeights.random(EMBED_DIM, biased=True)
    implementations = make_implementations()
    outputs = compute_outputs(implementations, x, plain)
    allowed = output_error_budget(x, plain)
    share = {
        "plain": budget_share_of_each_output(allowed, outputs),
        "masked": budget_share_of_each_output(
            output_error_budget(x, plain, may_attend=mask),
            compute_outputs(implementations, x, plain, mask),
        ),
        "biased": budget_share_of_each_output(
            output_error_budget(x, biased, may_attend=mask),
            compute_outputs(make_implementations(biased=True), x, biased, mask),
        ),
    }
    wrong = {
        how: compute_outputs({"torch": implementations["torch"]}, x, weights)["torch"]
        for how, weights in make_misread_weights(plain).items()
    }
    wide = {key: implementation.double() for key, implementation in implementations.items()}
    fine = budget_share_of_each_output(
        output_error_budget(x.double(), plain.double()), compute_outputs(wide, x.double(), plain)
    )
    pairs = largest_differences(outputs, outputs)
    return {
        "pairs": pairs,
        "each_pair_within": all_pairs_agree(allowed, outputs),
        "largest_pair": max(map(max, pairs)),
        "typical_output": float(allowed.exact.std()),
        "allowed": float(allowed.allowed.max()),
        "share": share,
        "largest_share": {name: max(each.values()) for name, each in share.items()},
        "misread_causes": named_causes_of_misread_weights(plain),
        "misread_pairs": largest_differences(wrong, outputs),
        "misread_share": (misread_share := budget_share_of_each_output(allowed, wrong)),
        "least_misread_share": min(misread_share.values()),
        "outside_in_float64": [key for key, used in fine.items() if used > 1],
    }


@torch.no_grad()
def einops_and_bert_blocks_are_post_norm() -> bool:
    """Check that einops' and BERT's blocks are norm(attention + input), bit for bit."""
    x, weights = torch.randn(BATCH, LENGTH, EMBED_DIM), SharedWeights.random(EMBED_DIM, biased=True)
    einops, bert = EinopsPage(EMBED_DIM, NUM_HEADS), Bert(EMBED_DIM, NUM_HEADS)
    norms = {einops: einops.layer_norm, bert: bert.inner.output.LayerNorm}
    return all(
        torch.equal(
            implementation.load_weights(weights).eval().compute_block(x),
            norm(implementation(x) + x),
        )
        for implementation, norm in norms.items()
    )
