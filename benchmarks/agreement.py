"""What is timed must do the same job: outputs are compared before the clock starts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from headwise import Attention, Budget, Mask, functional


def require_agreement(
    layer: Attention, x: Tensor, output: Tensor, *held: Tensor, mask: Mask | None = None
) -> None:
    """Raise AssertionError unless ``output`` is what the layer gives for ``x``, within its budget.

    The layer is written out here, for float32 and float64. ``held`` are the rotated keys, and the
    values, of earlier tokens.
    """

    def written(x: Tensor, *held: Tensor) -> Tensor:
        q = _projected(layer.q_proj, x).unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
        k, v = (
            _projected(projection, x).unflatten(-1, (layer.num_kv_heads, -1)).transpose(1, 2)
            for projection in (layer.k_proj, layer.v_proj)
        )
        if layer.rotary is not None:
            first = held[0].shape[2] if held else 0
            q, k = layer.rotary.rotate_both(q, k, torch.arange(first, first + x.shape[1]))
        if held:
            k, v = (torch.cat(pair, dim=2) for pair in zip(held, (k, v), strict=True))
        outputs = functional.head_outputs(q, k, v, mask=mask)
        return _projected(layer.out_proj, outputs.transpose(1, 2).flatten(2))

    with torch.no_grad():
        Budget.of(written, x, *held, name="output").assert_holds(output)


def _projected(projection: nn.Linear, x: Tensor) -> Tensor:
    bias = None if projection.bias is None else projection.bias.to(x.dtype)
    return linear(x, projection.weight.to(x.dtype), bias)
