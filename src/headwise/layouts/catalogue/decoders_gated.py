"""Decoders with an output gate: Qwen3-Next."""

from headwise.function.spec import FROM_CONFIG, AttentionSpec, NormRule, RotaryRule
from headwise.layouts.catalogue import describe_layout, head_norms, projections

_QUERIES = "(heads [{query}: head_dim | {gate}: head_dim])"  # of a head, then its gates

LAYOUTS = (
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
