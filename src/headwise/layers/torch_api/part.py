"""A call of the drop-in for a part of its heads: inputs, parameters and masks of these alone."""

from __future__ import annotations

from torch import Tensor, nn

from headwise.layers.part import HeadPart
from headwise.layers.torch_api import checks
from headwise.layers.torch_api.checks import CallOptions, Parameters


def weights_of_all_heads(weights: Tensor | None, part: HeadPart, *, average: bool) -> Tensor | None:
    """Return the weights that a call returns, from those of a part's heads."""
    if weights is None:
        return None
    if average:
        return part.mean_over_heads_from_own_mean(weights)
    return part.collect_returned_weights(weights)


def make_head_part_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: nn.MultiheadAttention,
    options: CallOptions,
    *,
    part: HeadPart,
) -> tuple[Tensor, Tensor, Tensor, Parameters, CallOptions]:
    """Return a call's arguments for a part of the heads.

    Raises:
        HeadwiseError: an ``attn_mask`` that is not for all heads.
    """
    floats = {
        name: mask
        for name, mask in (("key_padding_mask", options.padding), ("attn_mask", options.attn_mask))
        if isinstance(mask, Tensor) and mask.is_floating_point()
    }
    given = {"query": query} | floats
    if key is not query:
        given["key"] = key
    if value is not key:
        given["value"] = value
    inputs = part.check_inputs_and_sum_gradients(given)
    query = inputs["query"]
    key = inputs.get("key", query)
    attn_mask = inputs.get("attn_mask", options.attn_mask)
    if isinstance(attn_mask, Tensor) and attn_mask.dim() == 3:
        attn_mask = _attn_mask_of_head_part(
            attn_mask, query, key, part, batch_first=options.batch_first
        )
    padding = inputs.get("key_padding_mask", options.padding)
    options = options._replace(padding=padding, attn_mask=attn_mask)
    return query, key, inputs.get("value", key), _parameters_of_head_part(layer, part), options


def _attn_mask_of_head_part(
    mask: Tensor, query: Tensor, key: Tensor, part: HeadPart, *, batch_first: bool
) -> Tensor:
    """Return the rows of (batch*heads, queries, keys) that belong to the part's heads."""
    batched = query.dim() == 3
    batch = query.shape[0 if batch_first else 1] if batched else 1
    if mask.shape[0] != batch * part.num_heads:
        axis = 1 if batched and batch_first else 0
        shape = (batch * part.num_heads, query.shape[axis], key.shape[axis])
        checks.refuse_attn_mask_shape(mask, shape, batch, part.num_heads, batched=batched)
    return part.cut_channels(mask.unflatten(0, (batch, part.num_heads)), dim=1).flatten(0, 1)


def _parameters_of_head_part(layer: nn.MultiheadAttention, part: HeadPart) -> Parameters:
    """Return the part's parameters, in the separate form."""
    width = layer.embed_dim

    def share(parameter: Tensor | None, dim: int) -> Tensor | None:
        if parameter is None:
            return None
        weight = part.own_share_of_parameter(parameter)
        return weight if weight.shape[dim] != width else part.cut_channels(weight, dim=dim)

    def packed(parameter: Tensor) -> Tensor:
        thirds = part.own_share_of_parameter(parameter).unflatten(0, (3, width))
        return part.cut_channels(thirds, dim=1)

    if layer.in_proj_weight is None:
        separate = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
        weights = tuple(share(weight, 0) for weight in separate)
    else:
        weights = packed(layer.in_proj_weight).unbind(0)
    bias = layer.in_proj_bias
    return Parameters(
        embed_dim=width,
        width=width // part.num_heads * len(part.heads),
        num_heads=len(part.heads),
        packed=False,
        weights=weights,
        bias=None if bias is None else packed(bias).flatten(),
        bias_k=share(layer.bias_k, 2),
        bias_v=share(layer.bias_v, 2),
        add_zero_attn=layer.add_zero_attn,
    )
