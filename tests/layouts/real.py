"""The function of a real module beside that of the layer made of its weights, in float64."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise import Attention, Mask, ScoreBias
from headwise.layouts._layout import Layout

BATCH, LENGTH = 3, 24


@dataclass(frozen=True)
class Real:
    """A real module with its weights.

    Attributes:
        state: its tensors by their names within the module.
        outputs: what it gives for x (BATCH, LENGTH, embed_dim) in float64.
        options: of `Attention.from_layout`, beside the layout.
        mask: who may attend.
        unit: the unit roundoff of the narrowest dtype that it computes in; transformers takes the
            softmax, and the angles of a rotation, in float32 whatever the dtype.
        source: what keys and values are made of, in cross attention.
        score_bias: what the module adds to the scores and the layer has no option for.
    """

    state: dict[str, Tensor]
    x: Tensor
    outputs: Tensor
    options: dict[str, Any]
    mask: Mask | None = None
    unit: float = torch.finfo(torch.float64).eps
    source: Tensor | None = None
    score_bias: ScoreBias | None = None


def sharpen(module: nn.Module, *, seed: int = 0) -> None:
    """Weights for which attention is neither uniform nor saturated, biases and norms distinct."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            width = parameter.shape[-1] if parameter.dim() > 1 else 1
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            is_norm = "norm" in name.lower() and name.endswith("weight") and parameter.dim() == 1
            scaled = 1 + drawn / 4 if is_norm else drawn * 1.5 / width**0.5
            parameter.copy_(scaled)


def inputs(embed_dim: int, *, length: int = LENGTH, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, length, embed_dim, generator=generator, dtype=torch.float64)


@torch.no_grad()
def assert_same_function(layout: str | Layout, real: Real) -> None:
    """The layer made of the weights gives the outputs, to within rounding."""
    assert_gives(Attention.from_layout(real.state, layout=layout, **real.options).double(), real)


@torch.no_grad()
def assert_gives(layer: Attention, real: Real, ours: Tensor | None = None) -> None:
    """A layer gives the outputs, to within rounding; ``ours`` are those it gave in steps.

    Rounding the scores, each at most scale |q| |k| =: p, by u changes a weight by the factor
    1 + 2 p u, and the softmax by some u more; every product of n terms adds n u. All of it is
    relative to |A| |v| |wo|, which is computed here.
    """
    if ours is None:
        ours = layer(real.x, real.source, mask=real.mask, score_bias=real.score_bias)
    difference = (ours - real.outputs).abs()
    bound = _bound(layer, real)
    assert (difference <= bound).all(), f"off by {(difference / bound).max():.3g} of the budget"
    assert (bound < real.outputs.abs().mean() / 50).all(), "a budget that could not fail"


def _bound(layer: Attention, real: Real) -> Tensor:
    seen: dict[str, Tensor] = {}
    handle = layer.v_proj.register_forward_hook(lambda _, __, out: seen.update(v=out))
    matrix = layer.matrix(real.x, real.source, mask=real.mask, score_bias=real.score_bias)
    layer(real.x, real.source)
    handle.remove()
    v = seen["v"].unflatten(-1, (layer.num_kv_heads, -1)).transpose(1, 2)
    v = v.repeat_interleave(layer.num_heads // layer.num_kv_heads, dim=1)
    scale = layer.head_dim**-0.5 if layer.scale is None else layer.scale
    q, k = matrix.q, matrix.k
    peak = scale * q.norm(dim=-1).max() * k.norm(dim=-1).max()
    heads = matrix.dense().abs() @ v.abs()
    merged = heads.transpose(1, 2).flatten(2)
    size = merged @ layer.out_proj.weight.abs().mT
    if layer.out_proj.bias is not None:
        size = size + layer.out_proj.bias.abs()
    terms = max(layer.embed_dim, layer.source_dim) + layer.head_dim + k.shape[2] + merged.shape[-1]
    double = torch.finfo(torch.float64).eps
    return size * (real.unit * (4 * peak + 16) + double * terms * (1 + peak))
