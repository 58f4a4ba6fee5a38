"""Linear projections of a layer: their product, their initial values, and the report on a pass.

Products are `torch.nn.functional.linear`, or oneDNN's where that is faster. For float32 on CPU,
oneDNN's matrix product was 5 to 20 % faster than the BLAS call behind F.linear on one machine, and
twice as fast on another, forward and backward (docs/log.md). Large products of plain tensors in
eager mode use it. Everything else (few tokens, tracing, autocast, tensor subclasses, torch.func)
uses F.linear, with the same result within rounding.

A bias of another dtype is added to the product and leaves its dtype alone, as in
`torch.nn.MultiheadAttention`. F.linear accepts such a bias for some strides of ``x`` only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import has_torch_function

from headwise.errors import OptionError
from headwise.matrix.kernels.dispatch import Explanation
from headwise.support import private_torch
from headwise.support.text import describe_value
from headwise.support.tracing import is_autocast_enabled, is_recording_operators

if TYPE_CHECKING:
    from headwise.layers.attention import Attention

_PLAIN = (Tensor, torch.nn.Parameter)
# Multiply-adds from which oneDNN is used: below, it takes 1.04 to 2.7 times F.linear's time (one to
# 64 tokens of width 768), above 0.7 to 1.0 of it (docs/log.md).
PAYS_FROM = 2**25


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
        private_torch.HAS_ONEDNN_LINEAR
        and bool(torch.backends.mkldnn.enabled)
        # has_torch_function is False for DTensor and other subclasses of torch.
        and all(type(t) in _PLAIN for t in tensors)
        and all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)
        and not torch.is_autocast_enabled("cpu")
        and not has_torch_function(tensors)
        and not private_torch.is_in_functorch(unknown=True)
        and not private_torch.is_in_forward_mode()
        and not private_torch.is_in_dispatch_mode()
        and weight.dim() == 2
        and x.dim() >= 2
        and x.shape[-1] == weight.shape[1]
        and (bias is None or bias.shape == weight.shape[:1])
    )


# ---- initial values ------------------------------------------------------------------------------
# As in other libraries, by name. Each draws from the distribution of its source for the same sizes.
# Scores have the source's size too: the queries' projection is multiplied by the source's scale
# over the layer's scale. (A qk_norm removes that factor; the sources have none.)

Source = Literal["torch-packed", "torch-separate", "einops", "gpt2", "t5"]


def initialise_projections(
    layer: Attention, source: Source, *, num_layers: int | None = None
) -> None:
    """Initialise the projections of ``layer`` in place.

    After the same seed, torch, einops and T5 give the very numbers of the source, where the source
    has such a layer.

    * ``torch-packed``: nn.MultiheadAttention with one in_proj_weight; Xavier uniform over all
      three projections at once (torch/nn/modules/activation.py).
    * ``torch-separate``: nn.MultiheadAttention with kdim or vdim; Xavier uniform for each.
    * ``einops``: normal with the fan of one head, sqrt(2 / (embed_dim + head_dim)), and Xavier
      normal for the output (arogozhnikov/einops, docs/pytorch-examples.html, on the transformer).
    * ``gpt2``: normal with 0.02; with ``num_layers``, the number of layers of the model,
      0.02 / sqrt(2 * num_layers) for the output (Radford et al. 2019, section 2.3).
    * ``t5``: normal with (embed_dim * head_dim)**-0.5 for queries, embed_dim**-0.5 for keys and
      values, (num_heads * value_dim)**-0.5 for the output; T5 does not scale its scores
      (arXiv:1910.10683; transformers/models/t5/modeling_t5.py).

    Biases are 0, except for ``einops``, where they are drawn as in nn.Linear.

    Raises:
        OptionError: a source that is not among these, or num_layers for another than gpt2.
    """
    layers_fit = num_layers is None or (source == "gpt2" and num_layers >= 1)
    if source not in get_args(Source) or not layers_fit:
        layers = "" if num_layers is None else f" with num_layers={num_layers}"
        raise OptionError(
            saw=f"init={describe_value(source)}{layers}",
            needed=f"one of {', '.join(get_args(Source))}; num_layers, from 1, goes with gpt2",
            do='e.g. init="torch-packed"',
        )
    q, k, v, out = layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj
    if source in ("torch-packed", "torch-separate"):
        _initialise_torch(q, k, v, out, packed=source == "torch-packed")
    elif source == "einops":
        initialise_as_einops_page(q, k, v, out, head_dim=layer.head_dim, value_dim=layer.value_dim)
    else:
        output = 0.02 if num_layers is None else 0.02 / math.sqrt(2 * num_layers)
        stds = (0.02, 0.02, 0.02, output)
        if source == "t5":
            of_source = layer.source_dim**-0.5
            output = (layer.num_heads * layer.value_dim) ** -0.5
            stds = ((layer.embed_dim * layer.head_dim) ** -0.5, of_source, of_source, output)
        for projection, std in zip((q, k, v, out), stds, strict=True):
            nn.init.normal_(projection.weight, std=std)
    for projection in () if source == "einops" else (q, k, v, out):
        if projection.bias is not None:
            nn.init.zeros_(projection.bias)
    _rescale_query_projection(layer, 1.0 if source == "t5" else layer.head_dim**-0.5)


def initialise_as_einops_page(
    q: nn.Linear, k: nn.Linear, v: nn.Linear, out: nn.Linear, *, head_dim: int, value_dim: int
) -> None:
    """Initialise four projections as einops' page does, in its order."""
    for projection in (q, k, v):
        projection.reset_parameters()
    for projection, width in ((q, head_dim), (k, head_dim), (v, value_dim)):
        nn.init.normal_(projection.weight, std=math.sqrt(2 / (projection.in_features + width)))
    out.reset_parameters()
    nn.init.xavier_normal_(out.weight)


def _initialise_torch(
    q: nn.Linear, k: nn.Linear, v: nn.Linear, out: nn.Linear, *, packed: bool
) -> None:
    # The output first, with its bias, and the bound as two roots: bit for bit torch's numbers.
    out.reset_parameters()
    together = q.out_features + k.out_features + v.out_features
    for projection in (q, k, v):
        width = together if packed else projection.out_features
        bound = math.sqrt(3) * math.sqrt(2 / (projection.in_features + width))
        nn.init.uniform_(projection.weight, -bound, bound)


@torch.no_grad()
def _rescale_query_projection(layer: Attention, source_scale: float) -> None:
    layer_scale = layer.head_dim**-0.5 if layer.scale is None else layer.scale
    if layer_scale in (0.0, source_scale):
        return
    # Clamped so that products stay finite in the layer's dtype.
    largest = math.sqrt(torch.finfo(layer.q_proj.weight.dtype).max)
    ratio = abs(source_scale / layer_scale)
    factor = math.copysign(min(max(ratio, 1 / largest), largest), layer_scale)
    for parameter in layer.q_proj.parameters():
        parameter.mul_(factor)


# ---- report on a forward pass --------------------------------------------------------------------


@dataclass(frozen=True)
class LayerExplanation:
    """Printable report that ``layer.explain(...)`` returns."""

    tokens: str  # the number of tokens that are computed
    projections: tuple[str, ...]  # one line for each projection: name, kind, GFLOP, widths
    matrix: Explanation  # the kernels of the attention matrix
    weights: str | None = None  # how returned weights are computed; None where there are none

    def __str__(self) -> str:
        weights = [] if self.weights is None else [f"weights: {self.weights}"]
        tokens = f"tokens: {self.tokens}"
        return "\n".join([tokens, *weights, *self.projections, str(self.matrix)])

    __repr__ = __str__


def product_line(name: str, kind: str, tokens: int, widths: tuple[int, int]) -> str:
    """Return the line of a matrix product over ``tokens``, from one width to another."""
    cost = f"{2 * tokens * widths[0] * widths[1] / 1e9:.2g} GFLOP"
    return f"{name:<22} {kind:<10} {cost:<12} {widths[0]} to {widths[1]}"


def projection_line(name: str, projection: nn.Module, tokens: int) -> str:
    """Return the line of one projection over ``tokens``."""
    kind = type(projection).__name__
    inner, outer = (getattr(projection, f"{end}_features", None) for end in ("in", "out"))
    if inner is None or outer is None:
        return f"{name:<22} {kind}"
    # A module that computes a part of its widths has these in an attribute.
    widths = getattr(projection, "computed_widths", (inner, outer))
    return product_line(name, kind, tokens, widths)
