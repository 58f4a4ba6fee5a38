"""Decoders with an output gate: Qwen3-Next, and those that have a matrix of their own for it."""

from dataclasses import replace
from functools import partial

from headwise.function.spec import FROM_CONFIG, AttentionSpec, NormRule, RotaryRule
from headwise.layouts import catalogue
from headwise.layouts.catalogue import describe_layout, head_norms, left_to_config, projections

_QUERIES = "(heads [{query}: head_dim | {gate}: head_dim])"  # of a head, then its gates

_WHERE = {"self": "model.layers.{layer}.self_attn."}
_LLAMA = projections("q_proj k_proj v_proj o_proj", kv_heads="kv_heads")
_NORMED = _LLAMA | head_norms("q_norm", "k_norm")
_layout = partial(describe_layout, where=_WHERE)
_rotated = partial(left_to_config, "window", rotary=RotaryRule(width=FROM_CONFIG))
_PER_HEAD = {"gate_width": 1}


def _gate(name: str) -> dict[str, str]:
    return {f"{name}.weight": "wg: (heads gate_width) embed_dim"}


_MUSE = left_to_config(
    "scale window",
    rotary=RotaryRule(),
    qk_norm=NormRule(has_weight=False),
    output_gate="channel",
)
_OWN_MATRIX = (
    _layout(
        "afmoe",
        tensors=_NORMED | _gate("gate_proj"),
        function=_rotated(qk_norm=NormRule(), output_gate="channel"),
        note="layers without a window do not rotate",
    ),
    _layout(
        "lfm3",
        tensors=_NORMED | _gate("gate_proj"),
        function=_rotated(qk_norm=NormRule(), output_gate="head"),
        fixed=_PER_HEAD,
        note="some of its layers are no attention",
    ),
    _layout(
        "step3p7",
        tensors=_NORMED | _gate("g_proj"),
        function=_rotated(qk_norm=NormRule(weight_offset=1.0), output_gate="head"),
        fixed=_PER_HEAD,
    ),
    _layout(
        "laguna",
        tensors=_NORMED | _gate("g_proj"),
        function=_rotated(qk_norm=NormRule(), output_gate="head softplus"),
        fixed=_PER_HEAD,
        note="with gating per head; the gate is a softplus",
    ),
    _layout(
        "laguna-channel",
        tensors=_NORMED | _gate("g_proj"),
        function=_rotated(qk_norm=NormRule(), output_gate="channel softplus"),
        model="laguna",
        note="with gating per element",
    ),
    _layout(
        "muse",
        tensors=_LLAMA | _gate("gate_proj"),
        function=replace(_MUSE, output_norm=NormRule(has_weight=False)),
        model="muse_spark",
        note="norms without weights of queries, keys and head outputs; the scale has "
        "qk_scale_factor of its config",
    ),
    _layout(
        "muse-glimmer",
        tensors=_LLAMA | _gate("gate_proj"),
        function=_MUSE,
        note="Muse without a norm of head outputs",
    ),
)

LAYOUTS = (
    *_OWN_MATRIX,
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
