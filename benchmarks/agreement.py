"""Check that timed layers compute the same output, before the timing."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from headwise import Attention, Mask
from headwise.function import stages
from headwise.function.rounding import Roundoff, sum_error_bound
from headwise.testing import Budget

COMPARED = 64  # number of last queries


def require_agreement(
    layer: Attention,
    x: Tensor,
    outputs: Iterable[Tensor],
    *,
    cached: tuple[Tensor, ...] = (),
    mask: Mask | None = None,
) -> None:
    """Raise AssertionError unless each output is that of the layer for ``x``, within its budget.

    The reference is computed here in float32 and float64. ``cached`` holds the rotated keys and the
    values of earlier tokens; ``mask`` is for the last queries. The floor of the budget is the
    rounding of the last sum, over all heads (docs/budget.md).
    """

    def merged(x: Tensor, *cached: Tensor) -> Tensor:
        q = _heads(layer.q_proj, x, layer.num_heads)
        k, v = (_heads(p, x, layer.num_kv_heads) for p in (layer.k_proj, layer.v_proj))
        if layer.rotary is not None:
            first = cached[0].shape[2] if cached else 0
            q, k = layer.rotary.rotate_both(q, k, torch.arange(first, first + x.shape[1]))
        if cached:
            k, v = (torch.cat(pair, dim=2) for pair in zip(cached, (k, v), strict=True))
        outputs = stages.head_outputs(q[:, :, -COMPARED:], k, v, mask=mask)
        return outputs.transpose(1, 2).flatten(2)

    def full_output(x: Tensor, *cached: Tensor) -> Tensor:
        return _projected(layer.out_proj, merged(x, *cached))

    with torch.no_grad():
        terms = merged(x, *cached).abs() @ layer.out_proj.weight.abs().mT
        floor = Roundoff.of(x.dtype).u * sum_error_bound(layer.out_proj.in_features) * terms
        budget = Budget.for_function(full_output, x, *cached, floor=floor, name="output")
    for output in outputs:
        budget.assert_holds(output[:, -COMPARED:])


def _heads(projection: nn.Linear, x: Tensor, heads: int) -> Tensor:
    split: Tensor = _projected(projection, x).unflatten(-1, (heads, -1))
    return split.transpose(1, 2)


def _projected(projection: nn.Linear, x: Tensor) -> Tensor:
    bias = None if projection.bias is None else projection.bias.to(x.dtype)
    return linear(x, projection.weight.to(x.dtype), bias)
