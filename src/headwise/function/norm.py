"""Normalisation of queries and keys, which bounds the scores.

Henry et al. 2020 (arXiv:2010.04245); with learned weights as in Dehghani et al. 2023
(arXiv:2302.05442).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from headwise.function.spec import NormRule, ValueRule
from headwise.support.tracing import is_jit_tracing


def normalise(
    x: Float[Tensor, "*axes width"],
    weight: Float[Tensor, " width"] | None,
    bias: Float[Tensor, " width"] | None,
    *,
    kind: str,
    eps: float,
    weight_offset: float = 0.0,
) -> Float[Tensor, "*axes width"]:
    """Normalise the last axis, as a `NormRule` says; half types in float32, rounded once."""
    exact = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(exact)
    if weight is not None:
        weight = weight.to(exact)
        weight = weight_offset + weight if weight_offset else weight
    bias = None if bias is None else bias.to(exact)
    shape = x.shape[-1:] if weight is None else weight.shape  # a constant in a trace
    if kind == "layer":
        return F.layer_norm(wide, shape, weight, bias, eps).to(x.dtype)
    is_traced = torch.onnx.is_in_onnx_export() and is_jit_tracing()
    if kind == "rms" and not is_traced:  # torch's older ONNX exporter has no rms_norm
        normed = F.rms_norm(wide, shape, weight, eps)
    else:
        square = wide.square()
        size = square.mean(-1, keepdim=True) if kind == "rms" else square.sum(-1, keepdim=True)
        normed = wide * torch.rsqrt(size + eps)
        normed = normed if weight is None else normed * weight
    return (normed if bias is None else normed + bias).to(x.dtype)


def change_values(
    rule: ValueRule | None, bound: float | None, v: Float[Tensor, "*axes value_dim"]
) -> Float[Tensor, "*axes value_dim"]:
    """Return projected values as they enter the attention: clipped, normalised, times a factor."""
    v = v if bound is None else v.clamp(-bound, bound)
    if rule is None:
        return v
    if rule.eps is not None:
        v = normalise(v, None, None, kind="rms", eps=rule.eps)
    return v if rule.factor == 1 else rule.factor * v


def normalise_heads(
    rule: NormRule, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Normalise queries or keys, (batch, heads, length, head_dim).

    ``weight`` and ``bias`` are (head_dim,), or (heads, head_dim) with a row for each head.
    """
    heads = x.shape[1]
    if rule.over == "width":
        x = x.transpose(1, 2).flatten(2)
    normed = normalise(x, None, None, kind=rule.kind, eps=rule.eps)
    if rule.over == "width":
        normed = normed.unflatten(2, (heads, -1)).transpose(1, 2)
    rows = (each if each is None or each.dim() == 1 else each[:, None] for each in (weight, bias))
    weight, bias = rows
    normed = normed if weight is None else normed * (rule.weight_offset + weight)
    return normed if bias is None else normed + bias
