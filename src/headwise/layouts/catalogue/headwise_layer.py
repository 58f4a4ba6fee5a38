"""The layouts of headwise: that of `headwise.Attention`, and the canonical form."""

from dataclasses import replace
from functools import partial

from headwise.function.spec import ABSENT, FROM_CONFIG
from headwise.function.weights import AXES, LAMBDAS
from headwise.layouts.catalogue import APART, OPEN, describe_layout, head_norms, projections

_TENSORS = projections("q_proj k_proj v_proj out_proj", kv_heads="kv_heads", **APART) | {
    "gate_proj.weight": "wg: (heads gate_width) embed_dim",
    "gate_proj.bias": "bg: (heads gate_width)",
    "o_norm.weight": "o_norms: (heads value_dim)",
    "o_norm.bias": "o_norms_bias: (heads value_dim)",
    "sink": "sink: heads",
    **{name: f"{name}: lambda_dim" for name in LAMBDAS},
    "score_bias.relative_attention_bias.weight": "distances: buckets heads",
    "score_bias.rel_embeddings.weight": "place_table: buckets embed_dim",
    "score_bias.norm.weight": "place_norm: embed_dim",
    "score_bias.norm.bias": "place_norm_bias: embed_dim",
    "score_bias.q_proj.weight": "wpq: (heads head_dim) embed_dim",
    "score_bias.q_proj.bias": "bpq: (heads head_dim)",
    "score_bias.k_proj.weight": "wpk: (kv_heads head_dim) embed_dim",
    "score_bias.k_proj.bias": "bpk: (kv_heads head_dim)",
}
_layer = partial(
    describe_layout,
    function=OPEN,
    optional=("sink", "wg", "o_norms", *LAMBDAS),
    source="headwise, src/headwise/layers/attention.py",
)

LAYOUTS = (
    _layer(
        name="headwise",
        tensors=_TENSORS | head_norms("q_norm", "k_norm", bias=True),
        note="rotary layers hold rows in the order of their Rotary's pairing; this is half-split",
    ),
    _layer(
        name="headwise-width-norm",
        tensors=_TENSORS
        | {
            "q_norm.weight": "q_norms: (heads head_dim)",
            "k_norm.weight": "k_norms: (kv_heads head_dim)",
            "q_norm.bias": "q_norms_bias: (heads head_dim)",
            "k_norm.bias": "k_norms_bias: (kv_heads head_dim)",
        },
        note='with QKNorm(over="width")',
    ),
    _layer(
        name="headwise-latent",
        tensors=_TENSORS
        | {
            "q_proj.weight": "wq: (heads head_dim) query_dim",
            "k_proj.weight": "wk: (heads key_dim) rank",
            "v_proj.weight": "wv: (heads value_dim) rank",
            "k_proj.bias": "bk: (heads key_dim)",
            "v_proj.bias": "bv: (heads value_dim)",
            "q_latent_proj.weight": "wa: query_dim embed_dim",
            "q_latent_proj.bias": "ba: query_dim",
            "q_latent_norm.weight": "a_norm: query_dim",
            "kv_latent_proj.weight": "wc: rank embed_dim",
            "kv_latent_proj.bias": "bc: rank",
            "kv_latent_norm.weight": "c_norm: rank",
            "shared_k_proj.weight": "wr: shared_width embed_dim",
            "shared_k_proj.bias": "br: shared_width",
        },
        function=replace(OPEN, latent=FROM_CONFIG, qk_norm=ABSENT),
        splits={"source_dim": ("rank",)},
        optional=("sink", "wg", "o_norms", "wa", "a_norm", "c_norm", *LAMBDAS),
        note="with Latent(...)",
    ),
    describe_layout(
        name="canonical",
        tensors={name: f"{name}: {' '.join(axes)}" for name, axes in AXES.items()},
        function=replace(OPEN, latent=FROM_CONFIG),
        optional=tuple(name for name in AXES if name not in ("wq", "wk", "wv", "wo")),
        source="headwise, src/headwise/function/weights.py",
        note="the form between all layouts: a matrix for each head, and no fused axis",
    ),
)
