"""Other libraries' names for arguments of `Attention`, each with what to pass here.

The names are those of `torch.nn.MultiheadAttention`, and the one-to-one renames of transformers
and x-transformers. docs/migrating.md has the full migration guide.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headwise.support.arguments import ArgumentAdvice, renamed_arguments
from headwise.support.text import describe_value

_DROP_IN = "headwise.MultiheadAttention has it"


_BIASES = "q_bias={value}, k_bias={value}, v_bias={value}, out_bias={value}"
_SOURCE_DIM = ArgumentAdvice("one width of the source of keys and values", "source_dim={value}")
_NO_HINT = ArgumentAdvice("a mask for each call, or a window", "window=(None, 0)")

CONSTRUCTOR = {
    "bias": ArgumentAdvice("one option for each projection", _BIASES),
    "attention_bias": ArgumentAdvice(
        "one option for each projection; which of them it means depends on the model", _BIASES
    ),
    "batch_first": ArgumentAdvice(
        "inputs (batch, length, embed_dim): the batch is always first",
        "leave out batch_first, and pass x.transpose(0, 1) where the length is first",
    ),
    "add_bias_kv": ArgumentAdvice(
        f"a layer without an extra learned key and value; {_DROP_IN}",
        "leave it out, or use headwise.MultiheadAttention(..., add_bias_kv=True)",
    ),
    "add_zero_attn": ArgumentAdvice(
        "sink=True, whose logit stays at 0",
        "Attention(..., sink=True), then layer.sink.requires_grad_(False)",
    ),
    "kdim": _SOURCE_DIM,
    "vdim": _SOURCE_DIM,
    "causal": _NO_HINT,
    "is_causal": _NO_HINT,
    "attn_mask": ArgumentAdvice("a mask for each call", "layer(x, mask=Mask.from_torch(m))"),
    "rope_theta": ArgumentAdvice("a Rotary", "rotary=Rotary(theta={value})"),
    "sliding_window": ArgumentAdvice(
        "(left, right), beside the query's own key", "window=(sliding_window - 1, 0)"
    ),
}
COUNTS = renamed_arguments(
    num_heads="nhead n_heads heads num_attention_heads",
    num_kv_heads="kv_heads n_kv_heads num_key_value_heads",
)
# Options with another name and the same meaning.
CONSTRUCTOR |= COUNTS | renamed_arguments(
    embed_dim="d_model hidden_size dim",
    head_dim="dim_head",
    value_dim="value_dim_head",
    out_dim="dim_out",
    source_dim="dim_context",
    dropout="dropout_p attention_dropout",
    softcap="attn_logit_softcapping logit_cap",
    scale="softmax_scale",
    sink="sinks",
)

_SELF = ArgumentAdvice(
    "x, which queries, keys and values are projected from, and a source for cross attention",
    "layer(x), or layer(x, source)",
)
_WEIGHTS = "the output alone: the weights are read from layer.matrix(x)"
_CAUSAL = ArgumentAdvice("a mask", "mask=Mask.causal()")
_CACHE = ArgumentAdvice(
    "a Cache of this layer", "cache=layer.cache(batch=..., length=...), made once"
)
_NO_POSITIONS = "no positions: a layer with rotary counts its tokens"

CALL = {
    **dict.fromkeys(("query", "key", "value"), _SELF),
    "hidden_states": ArgumentAdvice("x", "layer(x)"),
    **dict.fromkeys(
        ("key_value_states", "encoder_hidden_states"),
        ArgumentAdvice("source, for keys and values", "layer(x, source)"),
    ),
    "attn_mask": ArgumentAdvice(
        "a Mask for a bool mask (True = may not attend in torch), a ScoreBias for a float one",
        'mask=Mask.from_torch(m), or score_bias=ScoreBias.dense(m, axes="queries keys")',
    ),
    "key_padding_mask": ArgumentAdvice(
        "a Mask for a bool mask (True = ignored in torch), a ScoreBias for a float one",
        'mask=Mask.from_torch_padding(m), or score_bias=ScoreBias.dense(m, axes="batch keys")',
    ),
    "attention_mask": ArgumentAdvice(
        "a Mask; in transformers 1 = real",
        'mask=Mask.may_attend(m.bool(), axes="batch keys"), with & Mask.causal() in a decoder',
    ),
    "is_causal": _CAUSAL,
    "causal": _CAUSAL,
    "need_weights": ArgumentAdvice(
        _WEIGHTS, "layer(x) for the output, layer.matrix(x).head_average() for the weights"
    ),
    "average_attn_weights": ArgumentAdvice(
        _WEIGHTS, "layer.matrix(x).head_average(), or layer.matrix(x).dense() for each head"
    ),
    "output_attentions": ArgumentAdvice(
        _WEIGHTS, "layer(x) for the output, layer.matrix(x).dense() for the weights"
    ),
    "past_key_values": _CACHE,
    "past_key_value": _CACHE,
    "position_ids": ArgumentAdvice(_NO_POSITIONS, "leave it out"),
    "position_embeddings": ArgumentAdvice(
        _NO_POSITIONS, "leave it out, and construct the layer with rotary=Rotary()"
    ),
}


def advice_on_positional_constructor_arguments(values: tuple[Any, ...]) -> ArgumentAdvice:
    """Return the advice for positional arguments as in torch, where the third is dropout."""
    dropout = describe_value(values[2])
    return ArgumentAdvice(
        "every option after embed_dim and num_heads by name", f"dropout={dropout}"
    )


def advice_on_positional_call_arguments(values: tuple[Any, ...]) -> ArgumentAdvice:
    """Return the advice for ``layer(query, key, value, ...)``."""
    query, key, value = values[:3]
    if len(values) > 3 or not isinstance(value, Tensor):
        return ArgumentAdvice(
            "x and source by position, everything else by name",
            "layer(x, source, mask=..., score_bias=..., gate=..., cache=...)",
        )
    if query is key and key is value:
        return ArgumentAdvice(_SELF.needed, "layer(x): pass x once for self-attention")
    if key is value:
        return ArgumentAdvice(
            _SELF.needed, "layer(query, key): keys and values come from one source"
        )
    return ArgumentAdvice(
        _SELF.needed,
        "layer(x, source) where key and value are one tensor; else project them yourself and use "
        "AttentionMatrix(q, k) @ v",
    )
