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


def _renamed(names: dict[str, str]) -> dict[str, Answer]:
    return {
        name: Answer(f"{own}, which is the same", f"{own}={{value}}") for name, own in names.items()
    }


CONSTRUCTOR = {
    "bias": Answer(
        "one option for each projection",
        "q_bias={value}, k_bias={value}, v_bias={value}, out_bias={value}",
    ),
    "attention_bias": Answer(
        "one option for each projection; which of them it means depends on the model",
        "q_bias={value}, k_bias={value}, v_bias={value}, out_bias={value}",
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
    "kdim": Answer("one width of the source of keys and values", "source_dim={value}"),
    "vdim": Answer("one width of the source of keys and values", "source_dim={value}"),
    "causal": Answer("a mask for each call, or a window", "window=(None, 0)"),
    "is_causal": Answer("a mask for each call, or a window", "window=(None, 0)"),
    "attn_mask": Answer("a mask for each call", "layer(x, mask=Mask.from_torch(m))"),
    "rope_theta": Answer("a Rotary", "rotary=Rotary(theta={value})"),
    "sliding_window": Answer(
        "(left, right), beside the query's own key", "window=(sliding_window - 1, 0)"
    ),
    **_renamed(
        {
            "d_model": "embed_dim",
            "hidden_size": "embed_dim",
            "dim": "embed_dim",
            "nhead": "num_heads",
            "n_heads": "num_heads",
            "heads": "num_heads",
            "num_attention_heads": "num_heads",
            "kv_heads": "num_kv_heads",
            "n_kv_heads": "num_kv_heads",
            "num_key_value_heads": "num_kv_heads",
            "dim_head": "head_dim",
            "value_dim_head": "value_dim",
            "dim_out": "out_dim",
            "dim_context": "source_dim",
            "dropout_p": "dropout",
            "attention_dropout": "dropout",
            "attn_logit_softcapping": "softcap",
            "logit_cap": "softcap",
            "softmax_scale": "scale",
            "sinks": "sink",
        }
    ),
}

_SELF = Answer(
    "x, which queries, keys and values are projected from, and a source for cross attention",
    "layer(x), or layer(x, source)",
)
_WEIGHTS = "the output alone: the weights are read from layer.matrix(x)"
_SOURCE = Answer("source, for keys and values", "layer(x, source)")

CALL = {
    "query": _SELF,
    "key": _SELF,
    "value": _SELF,
    "hidden_states": Answer("x", "layer(x)"),
    "key_value_states": _SOURCE,
    "encoder_hidden_states": _SOURCE,
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
    "is_causal": Answer("a mask", "mask=Mask.causal()"),
    "causal": Answer("a mask", "mask=Mask.causal()"),
    "need_weights": Answer(
        _WEIGHTS, "layer(x) for the output, layer.matrix(x).head_average() for the weights"
    ),
    "average_attn_weights": Answer(
        _WEIGHTS, "layer.matrix(x).head_average(), or layer.matrix(x).dense() for each head"
    ),
    "output_attentions": Answer(
        _WEIGHTS, "layer(x) for the output, layer.matrix(x).dense() for the weights"
    ),
    "past_key_values": Answer(
        "a Cache of this layer", "cache=layer.cache(batch=..., length=...), made once"
    ),
    "past_key_value": Answer(
        "a Cache of this layer", "cache=layer.cache(batch=..., length=...), made once"
    ),
    "position_ids": Answer("no positions: a layer with rotary counts its tokens", "leave it out"),
    "position_embeddings": Answer(
        "no positions: a layer with rotary counts its tokens",
        "leave it out, and construct the layer with rotary=Rotary()",
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
