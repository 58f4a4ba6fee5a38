"""Decoders whose keys and values come from a latent: DeepSeek V2 and V3, and what follows them.

Their code puts the channels of a query that turn behind the others, and the latent of a token
before its shared key. Nothing is reordered when weights are loaded there.
"""

from functools import partial

from headwise.function.spec import FROM_CONFIG, AttentionSpec, Latent, RotaryRule
from headwise.layouts.catalogue import describe_layout

_FUNCTION = AttentionSpec(
    scale=FROM_CONFIG,
    rotary=RotaryRule(width=FROM_CONFIG),
    latent=Latent(),
    temperature=FROM_CONFIG,
)
_DOWN, _UP = "([{c}: rank | {r}: shared_width])", "(heads [wk: key_dim | wv: value_dim]) rank"
_KEYS = {
    "kv_a_proj_with_mqa.weight": _DOWN.format(c="wc", r="wr") + " embed_dim",
    "kv_a_proj_with_mqa.bias": _DOWN.format(c="bc", r="br"),
    "kv_a_layernorm.weight": "c_norm: rank",
    "kv_b_proj.weight": _UP,
    "o_proj.weight": "wo: embed_dim (heads value_dim)",
    "o_proj.bias": "bo: embed_dim",
}
_OF_LATENT = {
    "q_a_proj.weight": "wa: query_dim embed_dim",
    "q_a_proj.bias": "ba: query_dim",
    "q_a_layernorm.weight": "a_norm: query_dim",
    "q_b_proj.weight": "wq: (heads head_dim) query_dim",
} | _KEYS
_OF_TOKENS = {"q_proj.weight": "wq: (heads head_dim) embed_dim"} | _KEYS
_DEMO = {
    "wkv_a.weight": _DOWN.format(c="wc", r="wr") + " embed_dim",
    "kv_norm.weight": "c_norm: rank",
    "wkv_b.weight": _UP,
    "wo.weight": "wo: embed_dim (heads value_dim)",
}
_SERVED = {
    "q_a_layernorm.weight": "a_norm: query_dim",
    "q_b_proj.weight": "wq: (heads head_dim) query_dim",
    "kv_a_layernorm.weight": "c_norm: rank",
    "o_proj.weight": "wo: embed_dim (heads value_dim)",
}
_FUSED = "([wa: query_dim | wc: rank | wr: shared_width]) embed_dim"
_layer = partial(
    describe_layout,
    where={"self": "model.layers.{layer}.self_attn."},
    outside="tokens=model.embed_tokens.weight final_norm=model.norm.weight "
    "unembedding=lm_head.weight | model.layers.{layer}. norm_1=input_layernorm.weight "
    "norm_2=post_attention_layernorm.weight gate=mlp.gate_proj.weight up=mlp.up_proj.weight "
    "down=mlp.down_proj.weight",
    function=_FUNCTION,
    splits={"source_dim": ("rank",)},
    rows="interleaved",
    rotated_last=True,
)
_demo = partial(
    _layer,
    where={"self": "layers.{layer}.attn."},
    root="",
    outside="tokens=embed.weight final_norm=norm.weight unembedding=head.weight | "
    "layers.{layer}. norm_1=attn_norm.weight norm_2=ffn_norm.weight gate=ffn.w1.weight "
    "up=ffn.w3.weight down=ffn.w2.weight",
    source="deepseek-ai/DeepSeek-V3, inference/model.py",
    unchecked="its code needs a GPU for its kernels; the names are those of its convert.py",
)

_served = partial(_layer, where={}, outside="", unchecked="its modules run on a GPU only")
_ABSORBED = (
    "The matrices that are absorbed are slices of kv_b_proj, so that every bit comes back; the "
    "norms of the latents have rms_norm_eps there"
)

LAYOUTS = (
    _layer(
        name="deepseek",
        tensors=_OF_LATENT,
        model="deepseek_v3",
        note="DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash, Youtu, A.X K1. Rows turn half-split "
        "where rope_interleave is false. The scale has mscale_all_dim of YaRN",
    ),
    _layer(
        name="deepseek-lite",
        tensors=_OF_TOKENS,
        model="deepseek_v2",
        note="the same without a latent of queries: DeepSeek V2 Lite",
    ),
    _layer(
        name="minicpm3",
        tensors=_OF_LATENT,
        rows="half-split",
        note="DeepSeek's tensors with half-split rows",
    ),
    _layer(
        name="longcat-flash",
        tensors=_OF_LATENT,
        where={"self": "model.layers.{layer}.self_attn.{half}."},
        outside="",
        function=AttentionSpec(
            scale=FROM_CONFIG, rotary=RotaryRule(width=FROM_CONFIG), latent=Latent(scaled=True)
        ),
        note="two attentions in each layer, whose latents are multiplied by "
        "sqrt(hidden_size / rank)",
    ),
    _layer(
        name="bailing-hybrid",
        tensors={name.replace("o_proj", "dense"): text for name, text in _OF_TOKENS.items()}
        | {"g_proj.weight": "wg: (heads gate_width) embed_dim"},
        where={"self": "model.layers.{layer}.attention."},
        fixed={"gate_width": 1},
        function=AttentionSpec(
            scale=FROM_CONFIG,
            rotary=RotaryRule(width=FROM_CONFIG),
            latent=Latent(),
            output_gate="head",
        ),
        note="Ling 3: its other layers are no attention. transformers names the module "
        "self_attn, and dense o_proj",
    ),
    _layer(
        name="kimi-linear",
        tensors=_OF_TOKENS,
        rows="half-split",
        function=AttentionSpec(latent=Latent()),
        note="nothing turns; its other layers are no attention",
    ),
    _demo(
        name="deepseek-demo",
        tensors={
            "wq_a.weight": "wa: query_dim embed_dim",
            "q_norm.weight": "a_norm: query_dim",
            "wq_b.weight": "wq: (heads head_dim) query_dim",
        }
        | _DEMO,
    ),
    _demo(
        name="deepseek-demo-lite",
        tensors={"wq.weight": "wq: (heads head_dim) embed_dim"} | _DEMO,
        note="without a latent of queries",
    ),
    _served(
        name="deepseek-vllm",
        tensors={"fused_qkv_a_proj.weight": _FUSED}
        | _SERVED
        | {"W_UK_T": "wk: heads key_dim rank", "W_UV": "wv: heads rank value_dim"},
        source="vllm-project/vllm, vllm/model_executor/layers/attention/mla_attention.py",
        note=f"as vLLM holds it in memory, in one tensor-parallel rank. {_ABSORBED}. Its older "
        "W_Q_UK is a product of two matrices, from which neither comes back",
    ),
    _served(
        name="deepseek-sglang",
        tensors={"fused_qkv_a_proj_with_mqa.weight": _FUSED}
        | _SERVED
        | {"w_kc": "wk: heads key_dim rank", "w_vc": "wv: heads rank value_dim"},
        source="sgl-project/sglang, python/sglang/srt/models/deepseek_v2.py",
        note=f"as SGLang holds it in memory, in one tensor-parallel rank. {_ABSORBED}",
    ),
)
