"""What is timed must do the same job: outputs are compared before the clock starts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from headwise import Attention, Mask, reference
from headwise.error_budget.rounding import Roundoff, growth
from headwise.testing import Budget

COMPARED = 64  # so many of the last queries


def require_agreement(
    layer: Attention,
    x: Tensor,
    outputs: Iterable[Tensor],
    *,
    held: tuple[Tensor, ...] = (),
    mask: Mask | None = None,
) -> None:
    """Raise AssertionError unless each output is that of the layer for ``x``, within its budget.

    The layer is written out here, for float32 and float64. ``held`` are the rotated keys, and the
    values, of earlier tokens; ``mask`` is for the last queries. The floor of the budget is what
    the sum over all heads, the last one, may be off (docs/budget.md).
    """

    def merged(x: Tensor, *held: Tensor) -> Tensor:
        q = _heads(layer.q_proj, x, layer.num_heads)
        k, v = (_heads(p, x, layer.num_kv_heads) for p in (layer.k_proj, layer.v_proj))
        if layer.rotary is not None:
            first = held[0].shape[2] if held else 0
            q, k = layer.rotary.rotate_both(q, k, torch.arange(first, first + x.shape[1]))
        if held:
            k, v = (torch.cat(pair, dim=2) for pair in zip(held, (k, v), strict=True))
        outputs = reference.head_outputs(q[:, :, -COMPARED:], k, v, mask=mask)
        return outputs.transpose(1, 2).flatten(2)

    def written(x: Tensor, *held: Tensor) -> Tensor:
        return _projected(layer.out_proj, merged(x, *held))

    with torch.no_grad():
        terms = merged(x, *held).abs() @ layer.out_proj.weight.abs().mT
        floor = Roundoff.of(x.dtype).u * growth(layer.out_proj.in_features) * terms
        budget = Budget.of(written, x, *held, floor=floor, name="output")
    for output in outputs:
        budget.assert_holds(output[:, -COMPARED:])


def _heads(projection: nn.Linear, x: Tensor, heads: int) -> Tensor:
    split: Tensor = _projected(projection, x).unflatten(-1, (heads, -1))
    return split.transpose(1, 2)


def _projected(projection: nn.Linear, x: Tensor) -> Tensor:
    bias = None if projection.bias is None else projection.bias.to(x.dtype)
    return linear(x, projection.weight.to(x.dtype), bias)
