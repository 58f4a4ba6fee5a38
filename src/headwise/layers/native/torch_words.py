"""Other libraries' names for arguments of `Attention`, each with what to pass here.

The names are those of `torch.nn.MultiheadAttention`, and the plain renames of transformers and
x-transformers. docs/migrating.md has the same answers with everything that changes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headwise.support.arguments import Answer
from headwise.support.axes import describe_value

_DROP_IN = "headwise.MultiheadAttention has it"


_BIASES = "q_bias={value}, k_bias={value}, v_bias={value}, out_bias={value}"
_SOURCE_DIM = Answer("one width of the source of keys and values", "source_dim={value}")
_NO_HINT = Answer("a mask for each call, or a window", "window=(None, 0)")

CONSTRUCTOR = {
    "bias": Answer("one option for each projection", _BIASES),
    "attention_bias": Answer(
        "one option for each projection; which of them it means depends on the model", _BIASES
    ),
    "batch_first": Answer(
        "inputs (batch, length, embed_dim): the batch is always first",
        "leave out batch_first, and pass x.transpose(0, 1) where the length is first",
    ),
    "add_bias_kv": Answer(
        f"a layer without an extra learned key and value; {_DROP_IN}",
        "leave it out, or use headwise.MultiheadAttention(..., add_bias_kv=True)",
    ),
    "add_zero_attn": Answer(
        "sink=True, whose logit stays at 0",
        "Attention(..., sink=True), then layer.sink.requires_grad_(False)",
    ),
    "kdim": _SOURCE_DIM,
    "vdim": _SOURCE_DIM,
    "causal": _NO_HINT,
    "is_causal": _NO_HINT,
    "attn_mask": Answer("a mask for each call", "layer(x, mask=Mask.from_torch(m))"),
    "rope_theta": Answer("a Rotary", "rotary=Rotary(theta={value})"),
    "sliding_window": Answer(
        "(left, right), beside the query's own key", "window=(sliding_window - 1, 0)"
    ),
}
# Options that have another name and the same meaning.
_RENAMED = {
    "embed_dim": "d_model hidden_size dim",
    "num_heads": "nhead n_heads heads num_attention_heads",
    "num_kv_heads": "kv_heads n_kv_heads num_key_value_heads",
    "head_dim": "dim_head",
    "value_dim": "value_dim_head",
    "out_dim": "dim_out",
    "source_dim": "dim_context",
    "dropout": "dropout_p attention_dropout",
    "softcap": "attn_logit_softcapping logit_cap",
    "scale": "softmax_scale",
    "sink": "sinks",
}
for _own, _names in _RENAMED.items():
    _same = Answer(f"{_own}, which is the same", f"{_own}={{value}}")
    CONSTRUCTOR |= dict.fromkeys(_names.split(), _same)

_SELF = Answer(
    "x, which queries, keys and values are projected from, and a source for cross attention",
    "layer(x), or layer(x, source)",
)
_WEIGHTS = "the output alone: the weights are read from layer.matrix(x)"
_CAUSAL = Answer("a mask", "mask=Mask.causal()")
_CACHE = Answer("a Cache of this layer", "cache=layer.cache(batch=..., length=...), made once")
_NO_POSITIONS = "no positions: a layer with rotary counts its tokens"

CALL = {
    **dict.fromkeys(("query", "key", "value"), _SELF),
    "hidden_states": Answer("x", "layer(x)"),
    **dict.fromkeys(
        ("key_value_states", "encoder_hidden_states"),
        Answer("source, for keys and values", "layer(x, source)"),
    ),
    "attn_mask": Answer(
        "a Mask for a bool mask (True = may not attend in torch), a ScoreBias for a float one",
        'mask=Mask.from_torch(m), or score_bias=ScoreBias.dense(m, axes="queries keys")',
    ),
    "key_padding_mask": Answer(
        "a Mask for a bool mask (True = ignored in torch), a ScoreBias for a float one",
        'mask=Mask.from_torch_padding(m), or score_bias=ScoreBias.dense(m, axes="batch keys")',
    ),
    "attention_mask": Answer(
        "a Mask; in transformers 1 = real",
        'mask=Mask.may_attend(m.bool(), axes="batch keys"), with & Mask.causal() in a decoder',
    ),
    "is_causal": _CAUSAL,
    "causal": _CAUSAL,
    "need_weights": Answer(
        _WEIGHTS, "layer(x) for the output, layer.matrix(x).head_average() for the weights"
    ),
    "average_attn_weights": Answer(
        _WEIGHTS, "layer.matrix(x).head_average(), or layer.matrix(x).dense() for each head"
    ),
    "output_attentions": Answer(
        _WEIGHTS, "layer(x) for the output, layer.matrix(x).dense() for the weights"
    ),
    "past_key_values": _CACHE,
    "past_key_value": _CACHE,
    "position_ids": Answer(_NO_POSITIONS, "leave it out"),
    "position_embeddings": Answer(
        _NO_POSITIONS, "leave it out, and construct the layer with rotary=Rotary()"
    ),
}


def beyond_the_sizes(values: tuple[Any, ...]) -> Answer:
    """Return the answer to torch's constructor by position: its third argument is dropout."""
    dropout = describe_value(values[2])
    return Answer("every option behind embed_dim and num_heads by name", f"dropout={dropout}")


def beyond_the_source(values: tuple[Any, ...]) -> Answer:
    """Return the answer to ``layer(query, key, value, ...)``."""
    query, key, value = values[:3]
    if len(values) > 3 or not isinstance(value, Tensor):
        return Answer(
            "x and source by position, everything else by name",
            "layer(x, source, mask=..., score_bias=..., gate=..., cache=...)",
        )
    if query is key and key is value:
        return Answer(_SELF.needed, "layer(x): pass x once for self-attention")
    if key is value:
        return Answer(_SELF.needed, "layer(query, key): keys and values come from one source")
    return Answer(
        _SELF.needed,
        "layer(x, source) where key and value are one tensor; else project them yourself and use "
        "AttentionMatrix(q, k) @ v",
    )
