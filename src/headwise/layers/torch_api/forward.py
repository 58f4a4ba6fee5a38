"""Forward pass of the drop-in, for the layer and for the function with torch's signature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from headwise.layers.explain import LayerExplanation, linear_product_line, projection_line
from headwise.layers.hooks import call_hook
from headwise.layers.linear import apply_linear
from headwise.layers.torch_api import checks
from headwise.layers.torch_api.masks import convert_masks
from headwise.layers.torch_api.polarity import warn_of_polarity
from headwise.matrix.operator import AttentionMatrix
from headwise.support.arguments import require_tensors


@dataclass(frozen=True, eq=False)
class ProjectionParameters:
    """Parameters before the output projection, with the names of torch's layer.

    ``width`` is that of all heads together: of the projected queries, keys and values.
    """

    embed_dim: int
    width: int
    num_heads: int
    _qkv_same_embed_dim: bool
    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    q_proj_weight: Tensor | None
    k_proj_weight: Tensor | None
    v_proj_weight: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None
    add_zero_attn: bool


# A layer's parameters are read once in each call: they may be replaced, pruned or parametrized.
Layer = ProjectionParameters | nn.MultiheadAttention


class CallOptions(NamedTuple):
    """Arguments of one call besides the inputs."""

    padding: Tensor | None
    attn_mask: Tensor | None
    is_causal: bool
    need_weights: bool
    average: bool
    dropout_p: float
    batch_first: bool = False
    static_k: Tensor | None = None
    static_v: Tensor | None = None


def attend_before_out_proj(
    query: Tensor, key: Tensor, value: Tensor, layer: Layer, options: CallOptions
) -> tuple[Tensor, Tensor | None]:
    """Return the input of the output projection, and the weights or None.

    Shapes:
        query: (batch, queries, embed_dim) with ``batch_first``, (queries, batch, embed_dim)
            without; key and value likewise. Unbatched: (queries, embed_dim).
        returns: like query; weights (batch, queries, keys) or (batch, heads, queries, keys).
    """
    matrix, v = build_matrix_and_values(query, key, value, layer, options)
    outputs, weights = _outputs_and_weights(matrix, v, options)
    if query.dim() == 2:
        weights = None if weights is None else weights.squeeze(0)
    shape = (*query.shape[:-1], _projected_width(layer))
    if query.dim() == 2 or options.batch_first:
        return outputs.transpose(1, 2).reshape(shape), weights
    return outputs.permute(2, 0, 1, 3).reshape(shape), weights


def build_matrix_and_values(
    query: Tensor, key: Tensor, value: Tensor, layer: Layer, options: CallOptions
) -> tuple[AttentionMatrix, Tensor]:
    """Return the attention matrix of a call, and its values (batch, heads, keys, head_dim)."""
    batched = checks.require_ranks(query, key, value, options.padding, options.attn_mask)
    padding = options.padding
    if not batched:
        padding = None if padding is None else padding.unsqueeze(0)
        same = (query is key, key is value)
        query = query.unsqueeze(0)
        key = query if same[0] else key.unsqueeze(0)
        value = key if same[1] else value.unsqueeze(0)
        options = options._replace(batch_first=True)
    q, k, v = _project_heads(query, key, value, layer, options)
    bias_k, bias_v = layer.bias_k, layer.bias_v
    slots = int(bias_k is not None or bias_v is not None) + int(layer.add_zero_attn)
    mask, score_bias = None, None
    if padding is not None or options.attn_mask is not None:
        checks.require_fitting_masks(padding, options.attn_mask, q, k, batched=batched)
        mask, score_bias = convert_masks(
            padding,
            options.attn_mask,
            num_heads=layer.num_heads,
            slots=slots,
            hinted=options.is_causal,
            dtype=q.dtype,
        )
    if slots:
        checks.require_both_bias_k_and_v(bias_k, bias_v, options.static_k, options.static_v)
        k, v = _append_bias_and_zero_keys(k, v, bias_k, bias_v, zeros=layer.add_zero_attn)
    return AttentionMatrix(q, k, mask=mask, score_bias=score_bias), v


def _projected_width(layer: Layer) -> int:
    return layer.width if isinstance(layer, ProjectionParameters) else layer.embed_dim


# ---- projections -----------------------------------------------------------------------------


def _project_heads(
    query: Tensor, key: Tensor, value: Tensor, layer: Layer, options: CallOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, projected or static: (batch, heads, length, head_dim)."""
    embed_dim, packed = layer.embed_dim, layer._qkv_same_embed_dim
    checks.require_input_sizes(
        query, key, value, embed_dim=embed_dim, packed=packed, batch_first=options.batch_first
    )
    bias = layer.in_proj_bias
    checks.require_packed_bias_shape(bias, _projected_width(layer))
    if packed:
        projected = _project_packed(query, key, value, layer, bias)
    else:
        projected = _project_separately(query, key, value, layer, bias)
    if options.batch_first:
        q, k, v = (x.transpose(1, 2) for x in projected)
    else:
        q, k, v = (x.permute(1, 2, 0, 3) for x in projected)
    if options.static_k is not None:
        k = checks.split_static_heads("static_k", options.static_k, like=q)
    if options.static_v is not None:
        v = checks.split_static_heads("static_v", options.static_v, like=q)
    if k.shape[2] != v.shape[2]:
        checks.raise_unequal_lengths_error(k, v)
    return (
        q,
        checks.cast_under_autocast_or_raise("keys", k, q),
        checks.cast_under_autocast_or_raise("values", v, q),
    )


def _project_packed(
    query: Tensor, key: Tensor, value: Tensor, layer: Layer, bias: Tensor | None
) -> tuple[Tensor, ...]:
    """Project with one product for self-attention, two where key is value, else three.

    Each result has the two leading axes of its input, then (heads, head_dim).
    """
    width, heads = _projected_width(layer), layer.num_heads
    weight = checks.require_present("in_proj_weight", layer.in_proj_weight, separate=False)
    checks.require_fitting_weight("query", query, weight, 3 * width, packed=True)
    if key is value and query is key:
        return _split_projected_parts_into_heads(apply_linear(query, weight, bias), 3, heads)
    checks.require_fitting_weight("key", key, weight, 3 * width, packed=True)
    if key is value:
        sizes = [width, 2 * width]
        w_q, w_kv = weight.split(sizes)
        b_q, b_kv = (None, None) if bias is None else bias.split(sizes)
        queries = _split_projected_parts_into_heads(apply_linear(query, w_q, b_q), 1, heads)
        return *queries, *_split_projected_parts_into_heads(apply_linear(key, w_kv, b_kv), 2, heads)
    checks.require_fitting_weight("value", value, weight, 3 * width, packed=True)
    return _project_each((query, key, value), weight.chunk(3), bias, heads)


def _project_separately(
    query: Tensor, key: Tensor, value: Tensor, layer: Layer, bias: Tensor | None
) -> tuple[Tensor, ...]:
    """Project with three separate weights; results as in `_project_packed`."""
    weights = []
    for name, x in (("query", query), ("key", key), ("value", value)):
        attribute = f"{name[0]}_proj_weight"
        weight = checks.require_present(attribute, getattr(layer, attribute), separate=True)
        checks.require_fitting_weight(name, x, weight, _projected_width(layer), packed=False)
        weights.append(weight)
    return _project_each((query, key, value), weights, bias, layer.num_heads)


def _project_each(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None, heads: int
) -> tuple[Tensor, ...]:
    biases = (None, None, None) if bias is None else bias.chunk(3)
    projected = zip(inputs, weights, biases, strict=True)
    return tuple(
        _split_projected_parts_into_heads(apply_linear(*operands), 1, heads)[0]
        for operands in projected
    )


def _split_projected_parts_into_heads(x: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """Return views of the ``parts`` of a projection: its leading axes, then (heads, head_dim)."""
    first, second, width = x.shape
    return x.view(first, second, parts, heads, width // (parts * heads)).unbind(2)


def _append_bias_and_zero_keys(
    k: Tensor, v: Tensor, bias_k: Tensor | None, bias_v: Tensor | None, *, zeros: bool
) -> tuple[Tensor, Tensor]:
    """Append the slots of bias_k, bias_v and add_zero_attn to keys and values."""
    keys, values = [k], [v]
    batch, heads, _, head_dim = k.shape
    for rows, slot, name in ((keys, bias_k, "bias_k"), (values, bias_v, "bias_v")):
        if slot is not None:
            if torch.promote_types(slot.dtype, k.dtype) == k.dtype:
                slot = slot.to(k.dtype)  # as torch.cat does
            slot = checks.cast_under_autocast_or_raise(name, slot, k)
            rows.append(slot.view(1, heads, 1, head_dim).expand(batch, heads, 1, head_dim))
        if zeros:
            rows.append(k.new_zeros(batch, heads, 1, head_dim))
    return torch.cat(keys, dim=2), torch.cat(values, dim=2)


def _outputs_and_weights(
    matrix: AttentionMatrix, v: Tensor, options: CallOptions
) -> tuple[Tensor, Tensor | None]:
    """Return head outputs (batch, heads, queries, head_dim), and the weights before dropout."""
    if options.need_weights and options.average and options.dropout_p == 0:
        # Equal to ``matrix @ v`` within the error budget; in inference one pass computes both.
        outputs, average = matrix.outputs_and_average(v)
        return call_hook(matrix, v, outputs), average
    checks.require_probability(options.dropout_p)
    dropout_p = options.dropout_p
    outputs = matrix @ v if dropout_p == 0 else matrix.dropped(v, dropout_p=dropout_p)
    outputs = call_hook(matrix, v, outputs)
    if not options.need_weights:
        return outputs, None
    return outputs, matrix.head_average() if options.average else matrix.dense(limit=None)


# ---- explanation -----------------------------------------------------------------------------


def explain_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: Layer,
    options: CallOptions,
    *,
    out_proj: nn.Module,
) -> LayerExplanation:
    """Return the report on `attend_before_out_proj` and the output projection for these inputs."""
    matrix, v = build_matrix_and_values(query, key, value, layer, options)
    tokens = f"{query.shape[:-1].numel():,}, all of the input"
    if options.padding is not None:
        tokens += "; torch's key_padding_mask hides keys, and padded queries are still computed"
    if options.dropout_p > 0:
        tokens += "; dropout in training allocates queries x keys for A @ v"
    lines = tuple(
        linear_product_line(
            name, "product", tokens=x.shape[:-1].numel(), widths=(x.shape[-1], rows)
        )
        for name, x, rows in _list_input_projections(query, key, value, layer)
    )
    lines += (projection_line("out_proj", out_proj, query.shape[:-1].numel()),)
    return LayerExplanation(
        tokens, lines, matrix.explain(v), _describe_returned_weights(matrix, v, options)
    )


def _list_input_projections(
    query: Tensor, key: Tensor, value: Tensor, layer: Layer
) -> list[tuple[str, Tensor, int]]:
    """Return each product of the input projection: its name, input and output width."""
    width = _projected_width(layer)
    if not layer._qkv_same_embed_dim:
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        return [(name, x, width) for name, x in zip(names, (query, key, value), strict=True)]
    if query is key and key is value:
        return [("in_proj q, k, v", query, 3 * width)]
    if key is value:
        return [("in_proj q", query, width), ("in_proj k, v", key, 2 * width)]
    return [(f"in_proj {n}", x, width) for n, x in zip("qkv", (query, key, value), strict=True)]


def _describe_returned_weights(matrix: AttentionMatrix, v: Tensor, options: CallOptions) -> str:
    if not options.need_weights:
        return "not returned"
    if not options.average:
        return "all heads, in queries x keys memory; need_weights=False saves it"
    if options.dropout_p > 0 or matrix._needs_gradient(v):
        return "mean over heads, in a second pass; need_weights=False saves it"
    if matrix._outputs_and_average_of_single_query(v):
        return "mean over heads, from the single row of weights, which also replaces A @ v below"
    return (
        "mean over heads, in one tiled pass that also computes A @ v, instead of the kernel below; "
        "need_weights=False saves it"
    )


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute `torch.nn.functional.multi_head_attention_forward` with the layer's contract.

    Arguments are those of torch. Inputs are (length, batch, width), or (length, width).
    ``static_k`` and ``static_v``, (batch*heads, keys, head_dim), replace the projected keys and
    values; masks then have their length.

    Raises:
        HeadwiseError: with the type and first line of torch's own error, as in
            `MultiheadAttention`.
    """
    require_tensors(query=query, key=key, value=value)
    checks.require_mask_for_hint(is_causal=is_causal, attn_mask=attn_mask)
    checks.require_divisible_embed_dim(embed_dim_to_check, num_heads)
    weights = (in_proj_weight, in_proj_bias, q_proj_weight, k_proj_weight, v_proj_weight)
    form = (embed_dim_to_check, embed_dim_to_check, num_heads, not use_separate_proj_weight)
    parameters = ProjectionParameters(*form, *weights, bias_k, bias_v, add_zero_attn)
    masks, returned = (key_padding_mask, attn_mask, is_causal), (need_weights, average_attn_weights)
    dropout = dropout_p if training else 0.0
    options = CallOptions(*masks, *returned, dropout, static_k=static_k, static_v=static_v)
    heads, attention = attend_before_out_proj(query, key, value, parameters, options)
    warn_of_polarity(key_padding_mask, attn_mask, stacklevel=2)
    return linear(heads, out_proj_weight, out_proj_bias), attention
