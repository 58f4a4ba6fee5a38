"""Forward pass of the drop-in, for the layer and for the function with torch's signature.

A call is checked once, by `checks.check_ranks` and `checks.check_call`; what follows is arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from headwise.layers import explain, hooks
from headwise.layers.linear import apply_linear
from headwise.layers.torch_api import checks
from headwise.layers.torch_api.checks import CallOptions, Parameters
from headwise.layers.torch_api.masks import convert_masks, warn_of_polarity
from headwise.matrix.operator import AttentionMatrix
from headwise.support.arguments import require_tensors


def read_parameters(layer: nn.MultiheadAttention) -> Parameters:
    """Read the parameters of a layer, once in a call: they may be replaced or parametrized."""
    packed = layer._qkv_same_embed_dim
    weights = (
        (layer.in_proj_weight,)
        if packed
        else (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    )
    return Parameters(
        layer.embed_dim,
        layer.embed_dim,
        layer.num_heads,
        packed,
        weights,
        layer.in_proj_bias,
        layer.bias_k,
        layer.bias_v,
        layer.add_zero_attn,
    )


def attend_before_out_proj(
    query: Tensor, key: Tensor, value: Tensor, parameters: Parameters, options: CallOptions
) -> tuple[Tensor, Tensor | None]:
    """Return the input of the output projection, and the weights before dropout or None.

    Shapes:
        query: (batch, queries, embed_dim) with ``batch_first``, (queries, batch, embed_dim)
            without; key and value likewise. Unbatched: (queries, embed_dim).
        returns: like query; weights (batch, queries, keys) or (batch, heads, queries, keys).
    """
    matrix, v = build_matrix_and_values(query, key, value, parameters, options)
    dropout_p, weights = options.dropout_p, None
    if options.need_weights and options.average and dropout_p == 0:
        # Equal to ``matrix @ v`` within the error budget; in inference one pass computes both.
        outputs, weights = matrix.outputs_and_average(v)
    else:
        outputs = matrix @ v if dropout_p == 0 else matrix.dropped(v, dropout_p=dropout_p)
    outputs = hooks.call_hook(matrix, v, outputs)
    if options.need_weights and weights is None:
        weights = matrix.head_average() if options.average else matrix.dense(limit=None)
    shape = (*query.shape[:-1], parameters.width)
    if query.dim() == 2:
        weights = None if weights is None else weights.squeeze(0)
    elif not options.batch_first:
        return outputs.permute(2, 0, 1, 3).reshape(shape), weights
    return outputs.transpose(1, 2).reshape(shape), weights


def build_matrix_and_values(
    query: Tensor, key: Tensor, value: Tensor, parameters: Parameters, options: CallOptions
) -> tuple[AttentionMatrix, Tensor]:
    """Return the attention matrix of a call, and its values (batch, heads, keys, head_dim)."""
    padding, attn_mask = options.padding, options.attn_mask
    batched = checks.check_ranks(query, key, value, padding, attn_mask)
    if not batched:
        padding = None if padding is None else padding.unsqueeze(0)
        same = (query is key, key is value)
        query = query.unsqueeze(0)
        key = query if same[0] else key.unsqueeze(0)
        value = key if same[1] else value.unsqueeze(0)
        options = options._replace(batch_first=True, padding=padding)
    checks.check_call(query, key, value, parameters, options, batched=batched)
    q, k, v = _project_heads(query, key, value, parameters, options)
    has_bias = parameters.bias_k is not None
    slots = int(has_bias) + int(parameters.add_zero_attn)
    mask, score_bias = None, None
    if padding is not None or attn_mask is not None:
        mask, score_bias = convert_masks(
            padding,
            attn_mask,
            num_heads=parameters.num_heads,
            slots=slots,
            hinted=options.is_causal,
            dtype=q.dtype,
        )
    if slots:
        k, v = _append_bias_and_zero_keys(k, v, parameters)
    return AttentionMatrix(q, k, mask=mask, score_bias=score_bias), v


# ---- projections -----------------------------------------------------------------------------

# The name of a product, its input, weight and bias, and the number of projections it packs.
Product = tuple[str, Tensor, Tensor, Tensor | None, int]


def _input_products(
    query: Tensor, key: Tensor, value: Tensor, parameters: Parameters
) -> list[Product]:
    """Return the products of the input projection, in the order of queries, keys, values.

    A packed weight takes one product in self-attention, two where key is value, else three.
    """
    weights, bias, width = parameters.weights, parameters.bias, parameters.width
    inputs = (query, key, value)
    if parameters.packed:
        (weight,) = weights
        assert weight is not None
        if key is value and query is key:
            return [("in_proj q, k, v", query, weight, bias, 3)]
        if key is value:
            sizes = [width, 2 * width]
            w_q, w_kv = weight.split(sizes)
            b_q, b_kv = (None, None) if bias is None else bias.split(sizes)
            return [("in_proj q", query, w_q, b_q, 1), ("in_proj k, v", key, w_kv, b_kv, 2)]
        weights, names = weight.chunk(3), ("in_proj q", "in_proj k", "in_proj v")
    else:
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    biases = (None, None, None) if bias is None else bias.chunk(3)
    ones = (1, 1, 1)
    return list(zip(names, inputs, weights, biases, ones, strict=True))  # type: ignore[arg-type]


def _project_heads(
    query: Tensor, key: Tensor, value: Tensor, parameters: Parameters, options: CallOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, projected or static: (batch, heads, length, head_dim)."""
    heads, head_dim = parameters.num_heads, parameters.width // parameters.num_heads
    batch, length = (0, 1) if options.batch_first else (1, 0)
    parts: list[Tensor] = []
    products = _input_products(query, key, value, parameters)
    for _, x, weight, bias, count in products:
        projected = apply_linear(x, weight, bias)
        first, second, _ = projected.shape
        projected = projected.view(first, second, count, heads, head_dim)
        if torch.is_grad_enabled():
            # Axes are moved after the split: gradients are then stacked as the product lies.
            parts += [part.permute(batch, 2, length, 3) for part in projected.unbind(2)]
        else:
            parts += projected.permute(batch, 3, 2, length, 4).unbind(2)
    q, k, v = parts
    if options.static_k is not None:
        k = options.static_k.view(q.shape[0], heads, -1, head_dim)
    if options.static_v is not None:
        v = options.static_v.view(q.shape[0], heads, -1, head_dim)
    if len(products) > 1 or k is not parts[1] or v is not parts[2]:
        k = checks.cast_under_autocast_or_raise("keys", k, q)
        v = checks.cast_under_autocast_or_raise("values", v, q)
    return q, k, v


def _append_bias_and_zero_keys(
    k: Tensor, v: Tensor, parameters: Parameters
) -> tuple[Tensor, Tensor]:
    """Append the slots of bias_k, bias_v and add_zero_attn to keys and values."""
    batch, heads, _, head_dim = k.shape
    extended = []
    for x, slot, name in ((k, parameters.bias_k, "bias_k"), (v, parameters.bias_v, "bias_v")):
        rows = [x]
        if slot is not None:
            if torch.promote_types(slot.dtype, k.dtype) == k.dtype:
                slot = slot.to(k.dtype)  # as torch.cat does
            slot = checks.cast_under_autocast_or_raise(name, slot, k)
            rows.append(slot.view(1, heads, 1, head_dim).expand(batch, heads, 1, head_dim))
        if parameters.add_zero_attn:
            rows.append(k.new_zeros(batch, heads, 1, head_dim))
        extended.append(torch.cat(rows, dim=2))
    return extended[0], extended[1]


# ---- explanation -----------------------------------------------------------------------------


def explain_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: Parameters,
    options: CallOptions,
    *,
    out_proj: nn.Module,
) -> explain.LayerExplanation:
    """Return the report on `attend_before_out_proj` and the output projection for these inputs."""
    matrix, v = build_matrix_and_values(query, key, value, parameters, options)
    tokens = f"{query.shape[:-1].numel():,}, all of the input"
    if options.padding is not None:
        tokens += "; torch's key_padding_mask hides keys, and padded queries are still computed"
    if options.dropout_p > 0:
        tokens += "; dropout in training allocates queries x keys for A @ v"
    lines = [
        explain.linear_product_line(
            name, "product", tokens=x.shape[:-1].numel(), widths=(x.shape[-1], len(weight))
        )
        for name, x, weight, *_ in _input_products(query, key, value, parameters)
    ]
    lines.append(explain.projection_line("out_proj", out_proj, query.shape[:-1].numel()))
    returned = _describe_returned_weights(matrix, v, options)
    return explain.LayerExplanation(tokens, tuple(lines), matrix.explain(v), returned)


def _describe_returned_weights(matrix: AttentionMatrix, v: Tensor, options: CallOptions) -> str:
    if not options.need_weights:
        return "not returned"
    if not options.average:
        return "all heads, in queries x keys memory; need_weights=False saves it"
    if options.dropout_p == 0 and matrix._outputs_and_average_of_single_query(v):
        return "mean over heads, from the single row of weights, which also replaces A @ v below"
    if options.dropout_p > 0 or matrix._needs_gradient(v):
        return "mean over heads, in a second pass; need_weights=False saves it"
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
    separate = (q_proj_weight, k_proj_weight, v_proj_weight)
    weights = separate if use_separate_proj_weight else (in_proj_weight,)
    form = (embed_dim_to_check, embed_dim_to_check, num_heads, not use_separate_proj_weight)
    parameters = Parameters(*form, weights, in_proj_bias, bias_k, bias_v, add_zero_attn)
    masks, returned = (key_padding_mask, attn_mask, is_causal), (need_weights, average_attn_weights)
    dropout = dropout_p if training else 0.0
    options = CallOptions(*masks, *returned, dropout, static_k=static_k, static_v=static_v)
    heads, attention = attend_before_out_proj(query, key, value, parameters, options)
    warn_of_polarity(key_padding_mask, attn_mask, stacklevel=2)
    return linear(heads, out_proj_weight, out_proj_bias), attention
