"""Functional form of the drop-in, with torch's signature."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear

from headwise.layers.torch_api import torch_checks
from headwise.layers.torch_api.polarity import warn_of_polarity
from headwise.layers.torch_api.shared_forward import (
    CallOptions,
    ProjectionParameters,
    attend_before_out_proj,
)
from headwise.support.explain_wrong_arguments import require_tensors


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
    torch_checks.require_mask_for_hint(is_causal=is_causal, attn_mask=attn_mask)
    torch_checks.require_divisible_embed_dim(embed_dim_to_check, num_heads)
    weights = (in_proj_weight, in_proj_bias, q_proj_weight, k_proj_weight, v_proj_weight)
    form = (embed_dim_to_check, embed_dim_to_check, num_heads, not use_separate_proj_weight)
    parameters = ProjectionParameters(*form, *weights, bias_k, bias_v, add_zero_attn)
    masks, returned = (key_padding_mask, attn_mask, is_causal), (need_weights, average_attn_weights)
    dropout = dropout_p if training else 0.0
    options = CallOptions(*masks, *returned, dropout, static_k=static_k, static_v=static_v)
    heads, attention = attend_before_out_proj(query, key, value, parameters, options)
    warn_of_polarity(key_padding_mask, attn_mask, stacklevel=2)
    return linear(heads, out_proj_weight, out_proj_bias), attention
