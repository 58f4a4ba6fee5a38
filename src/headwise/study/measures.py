"""Measurements that several questions share: counts, times, differences and error budgets."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.diagnosis._compare import compare
from headwise.function import rounding, stages
from headwise.function.budget import Budget
from headwise.function.rounding import Roundoff
from headwise.identify.results import Verdict
from headwise.masks.mask import Mask
from headwise.study.implementations import SharedWeights
from headwise.support.tracing import one_thread


def count_parameters(layer: nn.Module) -> int:
    return sum(p.numel() for p in layer.parameters())


def relative_times(
    functions: Mapping[str, Callable[[], object]], *, against: str, rounds: int
) -> dict[str, float]:
    """Return the median time of each function over that of ``against``.

    Every round runs all functions, in alternating order, so that other load on the machine affects
    all of them. One thread is used, because several threads would wait for the slowest.
    """
    ratios: dict[str, list[float]] = {name: [] for name in functions}
    with one_thread():
        for function in functions.values():  # the first call warms up
            function()
        for count in range(rounds):
            times = {}
            for name in list(functions)[:: -1 if count % 2 else 1]:
                start = time.perf_counter()
                functions[name]()
                times[name] = time.perf_counter() - start
            for name, seconds in times.items():
                ratios[name].append(seconds / times[against])
    return {name: median(values) for name, values in ratios.items()}


def layer_output(
    x: Float[Tensor, "batch queries embed_dim"],
    keys: Float[Tensor, "batch keys source_dim"],
    values: Float[Tensor, "batch keys value_source"],
    *weights: Tensor,
    num_heads: int,
    mask: Mask | None = None,
) -> Float[Tensor, "batch queries out_dim"]:
    """Compute a whole layer head by head, from `SharedWeights.tensors`.

    Queries are projected from ``x``, keys from ``keys``, values from ``values``. As in Attention Is
    All You Need (arXiv:1706.03762), section 3.2.2, each head has separate matrices, and no size has
    to divide another.
    """
    (wq, wk, wv, wo), biases = weights[:4], weights[4:] or (None,) * 4
    projected = []
    for tokens, weight, bias in zip((x, keys, values), (wq, wk, wv), biases[:3], strict=True):
        head_biases = [None] * num_heads if bias is None else bias.chunk(num_heads)
        rows = zip(weight.chunk(num_heads), head_biases, strict=True)
        projected.append([F.linear(tokens, head, head_bias)[:, None] for head, head_bias in rows])
    per_head = zip(*projected, strict=True)
    outputs = [stages.head_outputs(q, k, v, mask=mask) for q, k, v in per_head]
    return F.linear(torch.cat(outputs, -1).squeeze(1), wo, biases[3])


def layer_error_budget(
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    weights: SharedWeights,
    *,
    num_heads: int,
    mask: Mask | None = None,
) -> Budget:
    """Return the layer's exact output in float64, and the error allowed for each element."""
    formula = partial(layer_output, num_heads=num_heads, mask=mask)
    tensors = (tensor.detach() for tensor in weights.tensors)
    return Budget.for_function(formula, x, keys, values, *tensors, name="output")


class Projected(NamedTuple):
    """Queries, keys and values that one head or several heads may use."""

    q: Float[Tensor, "batch queries embed_dim"]
    k: Float[Tensor, "batch keys embed_dim"]
    v: Float[Tensor, "batch keys embed_dim"]

    def split(self, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (stages.split_heads(p, heads=heads) for p in self)
        return q, k, v

    def scores(self, heads: int) -> Float[Tensor, "batch {heads} queries keys"]:
        return stages.scores(*self.split(heads)[:2])

    def weights(self, heads: int) -> Float[Tensor, "batch {heads} queries keys"]:
        return stages.weights(*self.split(heads)[:2])

    def outputs(self, heads: int) -> Float[Tensor, "batch queries embed_dim"]:
        return stages.merge_heads(stages.head_outputs(*self.split(heads)))


def relative_difference(
    actual: Float[Tensor, "batch *rest"], reference: Float[Tensor, "batch *rest"]
) -> Float[Tensor, " batch"]:
    """Return the norm of the difference over the norm of the reference, for each sequence."""
    actual, reference = (x.detach().double().flatten(1) for x in (actual, reference))
    apart: Tensor = (actual - reference).norm(dim=1) / reference.norm(dim=1)
    return apart


def score_error_budget(projected: Projected) -> Budget:
    q, k, _ = projected.split(1)
    floor = rounding.row_rounding(q, k, Roundoff.of(q.dtype)).score_error
    return Budget.for_function(stages.scores, q, k, floor=floor, name="scores")


def score_sum_error(projected: Projected, heads: int) -> float:
    """Return the error of the heads' merged scores as those of a single head, in error budgets.

    The single head's q.k is the sum of the heads' q.k, and its scale is smaller by the root of
    their number.
    """
    merged = projected.scores(heads).sum(1, keepdim=True) / math.sqrt(heads)
    return score_error_budget(projected).check(merged).ratio


def error_budget_ratios(actual: Float[Tensor, "*shape"], budget: Budget) -> Float[Tensor, "*shape"]:
    """Return error over allowed error for every element; above 1 it is not rounding."""
    error = (actual.detach().double() - budget.exact).abs()
    return (error / budget.allowed).where(error > 0, 0.0)


def round_matrix(values: Float[Tensor, "rows columns"], *, digits: int) -> list[list[float]]:
    return [[round(value, digits) for value in row] for row in values.tolist()]


def name_cause(first: nn.Module, second: nn.Module, x: Tensor | None = None) -> str:
    """Return the causes of a difference that `compare` names, or its verdict with the reason.

    ``x`` is (batch, tokens, width), or None for the inputs that headwise makes.
    """
    diagnosis = compare(first, second, x)
    assert diagnosis.function is not None
    if diagnosis.verdict is Verdict.DIFFERENT:
        return " and ".join(cause.name for cause in diagnosis.function.causes)
    reason = diagnosis.function.blind.partition(":")[0]
    return f"{diagnosis.verdict}: {reason}" if reason else str(diagnosis.verdict)
