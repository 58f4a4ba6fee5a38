"""Decoders with an output gate: Qwen3-Next, and those with a matrix for it."""

from dataclasses import replace
from typing import Any

from headwise.function.spec import FROM_CONFIG, AttentionSpec, NormRule, RotaryRule
from headwise.layouts import catalogue
from headwise.layouts.catalogue import describe_layout, head_norms, projections

_QUERIES = "(heads [{query}: head_dim | {gate}: head_dim])"  # of a head, then its gates

_NORMED = projections("q_proj k_proj v_proj o_proj", kv_heads="kv_heads") | head_norms(
    "q_norm", "k_norm"
)
_FOR_CHANNELS = "wg: (heads head_dim) embed_dim"
_FOR_HEADS: dict[str, Any] = {"fixed": {"gate_width": 1}}
_WHERE = {"self": "model.layers.{layer}.self_attn."}
_FUNCTION = AttentionSpec(
    rotary=RotaryRule(), qk_norm=NormRule(), window=FROM_CONFIG, output_gate="channel"
)

LAYOUTS = (
    describe_layout(
        name="afmoe",
        tensors=_NORMED | {"gate_proj.weight": _FOR_CHANNELS},
        where=_WHERE,
        function=_FUNCTION,
        note="layers without a window do not rotate",
    ),
    describe_layout(
        name="lfm3",
        tensors=_NORMED | {"gate_proj.weight": "wg: (heads gate_width) embed_dim"},
        where=_WHERE,
        function=replace(_FUNCTION, output_gate="head"),
        **_FOR_HEADS,
    ),
    describe_layout(
        name="step3p5",
        tensors=_NORMED | {"g_proj.weight": "wg: (heads gate_width) embed_dim"},
        where=_WHERE,
        function=AttentionSpec(
            rotary=RotaryRule(width=FROM_CONFIG),
            qk_norm=NormRule(weight_offset=1.0),
            window=FROM_CONFIG,
            output_gate="head",
        ),
        source="transformers, models/step3p7/modeling_step3p7.py",
        **_FOR_HEADS,
    ),
    describe_layout(
        name="hrm-text",
        tensors=catalogue.fused_projection_by_pattern(
            "gqkv_proj",
            "([wg: heads head_dim | wq: heads head_dim | wk: kv_heads head_dim | "
            "wv: kv_heads head_dim])",
            bias=False,
        )
        | catalogue.output_projection("o_proj", bias=False),
        where={"self": "model.L_module.layers.{layer}.attn."},
        function=AttentionSpec(rotary=RotaryRule(), output_gate="channel"),
    ),
    describe_layout(
        name="qwen3-next",
        tensors=projections("q_proj k_proj v_proj o_proj", kv_heads="kv_heads")
        | {
            "q_proj.weight": _QUERIES.format(query="wq", gate="wg") + " embed_dim",
            "q_proj.bias": _QUERIES.format(query="bq", gate="bg"),
        }
        | head_norms("q_norm", "k_norm"),
        where={"self": "model.layers.{layer}.self_attn."},
        function=AttentionSpec(
            rotary=RotaryRule(width=FROM_CONFIG),
            qk_norm=NormRule(weight_offset=1.0),
            output_gate="channel",
        ),
        source="transformers, models/qwen3_next/modeling_qwen3_next.py",
        note="every fourth layer attends, the others are no attention. A quarter of a head is "
        "rotated. In q_proj each head has its queries, then its gates",
    ),
)
