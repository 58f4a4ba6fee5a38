"""Linear projections of a layer: their product, and the report on a pass.

Products are `torch.nn.functional.linear`, or oneDNN's where that is faster: large float32 products
of plain tensors in eager mode, on processors that `headwise.support.processor` names. Everything
else (few tokens, tracing, autocast, tensor subclasses, torch.func) uses F.linear, with the same
result within rounding.

A projection of the native layer is a module that is called. Where oneDNN's product serves and
nothing can observe the call, `project` computes the product of its weight and bias in its place.

A bias of another dtype is added to the product and leaves its dtype alone, as in
`torch.nn.MultiheadAttention`. F.linear accepts such a bias for some strides of ``x`` only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from headwise.matrix.kernels.dispatch import Explanation
from headwise.support import private_torch
from headwise.support.processor import may_use_onednn, product_here
from headwise.support.tracing import is_autocast_enabled, is_recording_operators

# Multiply-adds from which oneDNN is used: below, it takes 1.04 to 2.7 times F.linear's time (one to
# 64 tokens of width 768), above 0.7 to 1.0 of it (docs/log.md).
PAYS_FROM = 2**25


# Classes of projections that only multiply.
_LINEARS = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)


def project(projection: nn.Module, x: Tensor) -> Tensor:
    """Call a projection; where nothing can observe that, compute its product alone."""
    is_plain = type(projection) in _LINEARS and type(x) is Tensor
    weight = projection._parameters.get("weight") if is_plain else None
    if weight is None or torch.compiler.is_compiling() or x.numel() * len(weight) < PAYS_FROM:
        output: Tensor = projection(x)
    elif not has_fast_product() or _is_observed(projection):
        output = projection(x)
    else:
        output = apply_linear(x, weight, projection._parameters["bias"])
    return output


def has_fast_product() -> bool:
    """True if large products are oneDNN's on this processor."""
    return private_torch.HAS_ONEDNN_LINEAR and product_here().product == "onednn"


def _is_observed(projection: nn.Module) -> bool:
    """True if somebody may see, or change, a call of this module."""
    parameters = projection._parameters
    is_plain = parameters.keys() == {"weight", "bias"} and all(
        parameter is None or type(parameter) is nn.Parameter for parameter in parameters.values()
    )
    return (
        not is_plain
        or torch.nn.functional.linear is not linear
        or private_torch.is_call_replaced(projection)
        or private_torch.has_module_hooks(projection)
        or private_torch.is_recorded()
        or is_recording_operators()
    )


def apply_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``x @ weight.T + bias``, with F.linear's shapes, errors and gradients."""
    if bias is not None and bias.dtype != x.dtype and not is_autocast_enabled(x.device.type):
        out = apply_linear(x, weight, None)
        return (out + bias).to(out.dtype)
    # A recorded choice by size would hold for this size only.
    is_small = is_recording_operators() or x.numel() * weight.shape[0] < max(PAYS_FROM, 1)
    if is_small or not _is_supported_by_onednn(x, weight, bias):
        return linear(x, weight, bias)
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        # Flat rows, since a view that a Function returns cannot be changed in place.
        rows: Tensor = _Linear.apply(x.flatten(0, -2), weight, bias)  # type: ignore[no-untyped-call]
        shaped: Tensor = rows.unflatten(0, x.shape[:-1])
        return shaped
    product: Tensor = private_torch.onednn_linear(x, weight, bias)
    return product


class _Linear(torch.autograd.Function):
    """oneDNN's product; `apply_linear` computes its gradients, so they are differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        product: Tensor = private_torch.onednn_linear(x, weight, bias)
        return product

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        upstream = upstream.contiguous()
        return (
            apply_linear(upstream, weight.mT, None) if of_x else None,
            apply_linear(upstream.mT, x.mT, None) if of_weight else None,
            upstream.sum(0) if of_bias else None,
        )


def _is_supported_by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    tensors = (x, weight) if bias is None else (x, weight, bias)
    return (
        has_fast_product()
        and may_use_onednn(*tensors)
        and weight.dim() == 2
        and x.dim() >= 2
        and x.shape[-1] == weight.shape[1]
        and (bias is None or bias.shape == weight.shape[:1])
    )


# ---- report on a forward pass --------------------------------------------------------------------


@dataclass(frozen=True)
class LayerExplanation:
    """Printable report that ``layer.explain(...)`` returns."""

    tokens: str  # the number of tokens that are computed
    projections: tuple[str, ...]  # one line for each projection: name, kind, GFLOP, widths
    matrix: Explanation  # the kernels of the attention matrix
    weights: str | None = None  # how returned weights are computed; None where there are none
    form: str | None = None  # of keys and values from a latent, and why; None for those of tokens

    def __str__(self) -> str:
        weights = [] if self.weights is None else [f"weights: {self.weights}"]
        weights += [] if self.form is None else [f"latent: {self.form}"]
        tokens = f"tokens: {self.tokens}"
        return "\n".join([tokens, *weights, *self.projections, str(self.matrix)])

    __repr__ = __str__


def product_line(name: str, kind: str, tokens: int, widths: tuple[int, int], like: Tensor) -> str:
    """Return the line of a product; ``like`` has its dtype and device."""
    count = tokens * widths[0] * widths[1]
    line = f"{name:<22} {kind:<10} {f'{2 * count / 1e9:.2g} GFLOP':<12} {widths[0]} to {widths[1]}"
    if count < PAYS_FROM or like.dtype != torch.float32 or like.device.type != "cpu":
        return line
    by = "oneDNN" if has_fast_product() else "F.linear"
    return f"{line}, by {by}: {product_here().why}"


def projection_line(name: str, projection: nn.Module, tokens: int, like: Tensor) -> str:
    kind = type(projection).__name__
    inner, outer = (getattr(projection, f"{end}_features", None) for end in ("in", "out"))
    if inner is None or outer is None:
        return f"{name:<22} {kind}"
    # A module that computes a part of its widths has these in an attribute.
    widths = getattr(projection, "computed_widths", (inner, outer))
    return product_line(name, kind, tokens, widths, like)
