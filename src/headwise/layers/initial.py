"""Initialisation of attention's projections as in other libraries, by name.

Each draws from the distribution of its source for the same sizes. Scores have the source's size
too: the queries' projection is multiplied by the source's scale over the layer's scale. (A qk_norm
removes that factor; the sources have none.)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import nn

from headwise.errors import OptionError
from headwise.support.text import describe_value

if TYPE_CHECKING:
    from headwise.layers.attention import Attention

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
            _zero_biases(projection)
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
    for projection in (q, k, v, out):
        _zero_biases(projection)


def _zero_biases(projection: nn.Linear) -> None:
    if projection.bias is not None:
        nn.init.zeros_(projection.bias)


@torch.no_grad()
def _rescale_query_projection(layer: Attention, source_scale: float) -> None:
    """Multiply the queries' projection by the source's scale over the layer's scale."""
    layer_scale = layer.head_dim**-0.5 if layer.scale is None else layer.scale
    if layer_scale in (0.0, source_scale):
        return
    # Clamped so that products stay finite in the layer's dtype.
    largest = math.sqrt(torch.finfo(layer.q_proj.weight.dtype).max)
    ratio = abs(source_scale / layer_scale)
    factor = math.copysign(min(max(ratio, 1 / largest), largest), layer_scale)
    for parameter in layer.q_proj.parameters():
        parameter.mul_(factor)
