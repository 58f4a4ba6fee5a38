"""Decoders that fuse queries, keys and values: GPT-2, GPT-NeoX, Falcon, and what came of them."""

from functools import partial

from headwise.function import spec
from headwise.function.spec import FROM_CONFIG, AttentionSpec, NormRule, RotaryRule
from headwise.layouts import catalogue
from headwise.layouts.catalogue import describe_layout, output_projection, qkv_fused_by_projection

_HALVES = AttentionSpec(rotary=RotaryRule())
_SHARE = AttentionSpec(rotary=RotaryRule(width=FROM_CONFIG))
_NO_CLASS = "transformers has no class for it: its code lies beside the weights"
_MASKS = ("bias", "masked_bias")
_ANGLES = ("rotary_emb.inv_freq",)

# One kv head, written as an axis: it is then told from a layout with more of them.
_ONE_KV_HEAD = {"kv_heads": 1}

_CONV1D = qkv_fused_by_projection("c_attn", columns=True) | {
    "c_proj.weight": "wo: (heads head_dim) out_dim",
    "c_proj.bias": "bo: out_dim",
}
GPT2 = (
    "tokens=wte.weight positions=wpe.weight final_norm=ln_f.* unembedding=lm_head.weight | "
    "h.{layer}. norm_1=ln_1.* norm_2=ln_2.* up=mlp.c_fc.* down=mlp.c_proj.*"
)
_NEOX_OUTSIDE = (
    "tokens=gpt_neox.embed_in.weight final_norm=gpt_neox.final_layer_norm.* "
    "unembedding=embed_out.weight | gpt_neox.layers.{layer}. norm_1=input_layernorm.* "
    "norm_2=post_attention_layernorm.* up=mlp.dense_h_to_4h.* down=mlp.dense_4h_to_h.*"
)

_no_class = partial(describe_layout, unchecked=_NO_CLASS)
_gpt2_like = partial(describe_layout, where={"self": "h.{layer}.attn."}, beside=_MASKS)
_GPT = (
    _gpt2_like(
        name="gpt2",
        tensors=_CONV1D,
        outside=GPT2,
        columns=True,
        note="all matrices are stored for x @ weight; c_proj is square, so that a transpose left "
        "out raises no error. GPT and ImageGPT have the same. With "
        "scale_attn_by_inverse_layer_idx the scale is smaller by the layer's number from 1",
    ),
    _gpt2_like(
        name="jais",
        tensors=_CONV1D,
        function=AttentionSpec(scale=FROM_CONFIG, score_bias=FROM_CONFIG),
        source="vllm, vllm/model_executor/models/jais.py",
        unchecked=_NO_CLASS,
        note="the names of GPT-2; 1/head_dim with mup_scale_qk_dot_by_d, and ALiBi with "
        "position_embedding_type alibi",
    ),
    describe_layout(
        name="codegen",
        tensors=catalogue.fused_projection_by_pattern(
            "qkv_proj",
            "(shard [wq: shard_heads head_dim | wv: shard_heads head_dim "
            "| wk: shard_heads head_dim])",
            bias=False,
        )
        | output_projection("out_proj", bias=False),
        where={"self": "h.{layer}.attn."},
        beside=("causal_mask", *_MASKS),
        splits={"heads": ("shard", "shard_heads")},
        fixed={"shard": 4},
        function=AttentionSpec(rotary=RotaryRule(width=FROM_CONFIG)),
        rows="interleaved",
        note="four shards, as it was trained on; in each all queries, all values, all keys. The "
        "first rotary_dim channels of a head are rotated",
    ),
    _gpt2_like(
        name="gpt-bigcode-mqa",
        tensors=qkv_fused_by_projection("c_attn", "c_proj", kv_heads="kv_heads"),
        fixed=_ONE_KV_HEAD,
        model="gpt_bigcode",
        note="the names of GPT-2, but matrices as torch's linear layer stores them: SantaCoder, "
        "StarCoder",
    ),
    _gpt2_like(
        name="gpt-bigcode-mha",
        tensors=catalogue.qkv_fused_by_head("c_attn") | output_projection("c_proj"),
        model="gpt_bigcode",
        note="with multi_query false; the shapes are those of nanogpt, the order is not",
    ),
    _no_class(
        name="qwen1",
        tensors=qkv_fused_by_projection("c_attn") | output_projection("c_proj", bias=False),
        where={"self": "h.{layer}.attn."},
        beside=(*_MASKS, *_ANGLES),
        function=_HALVES,
        source="vllm, vllm/model_executor/models/qwen.py",
        note="beyond its training length queries are scaled by the logarithm of their position",
    ),
)

_neox_like = partial(
    describe_layout,
    where={"self": "gpt_neox.layers.{layer}.attention."},
    outside=_NEOX_OUTSIDE,
    beside=(*_MASKS, *_ANGLES),
    function=_SHARE,
)
_NEOX = (
    _neox_like(
        name="neox",
        tensors=catalogue.qkv_fused_by_head("query_key_value") | output_projection("dense"),
        beside=(*_MASKS, *_ANGLES, "dense_bias"),
        model="gpt_neox",
        note="Pythia. The first quarter of a head is rotated, or what rotary_pct says. The "
        "block adds GPT-NeoX Japanese's dense_bias",
    ),
    _neox_like(
        name="neox-split",
        tensors=catalogue.projections("query key value dense"),
        source="headwise: GPT-NeoX with its fused layer taken apart",
        unchecked="no package runs it",
        note="for code that wants one matrix for each projection; all else keeps its name",
    ),
    describe_layout(
        name="bloom",
        tensors=catalogue.qkv_fused_by_head("query_key_value") | output_projection("dense"),
        where={"self": "h.{layer}.self_attention."},
        function=AttentionSpec(score_bias=spec.AlibiRule()),
        note="the module adds the residual to its output",
    ),
    describe_layout(
        name="persimmon",
        tensors=catalogue.qkv_fused_by_head("query_key_value")
        | output_projection("dense")
        | catalogue.head_norms("q_layernorm", "k_layernorm", bias=True),
        where={"self": "model.layers.{layer}.self_attn."},
        beside=_ANGLES,
        function=AttentionSpec(rotary=RotaryRule(width=FROM_CONFIG), qk_norm=NormRule("layer")),
        note="Fuyu's decoder too. Half of a head is rotated",
    ),
    _no_class(
        name="chatglm-6b",
        tensors=catalogue.qkv_fused_by_head("query_key_value") | output_projection("dense"),
        where={"self": "layers.{layer}.attention."},
        beside=_ANGLES,
        function=AttentionSpec(rotary=spec.Other("half-split in each half of the head")),
        axes="length batch width",
        source="THUDM/ChatGLM-6B, modeling_chatglm.py",
        note="a head is two halves, the first rotated by the place in the text, the second by the "
        "place in the block that is generated; the scale and its inverse are applied in two steps",
    ),
)

_falcon = partial(describe_layout, where={"self": "h.{layer}.self_attention."}, model="falcon")
_GROUPED = (
    _falcon(
        name="falcon-rw",
        tensors=catalogue.qkv_fused_by_head("query_key_value") | output_projection("dense"),
        function=AttentionSpec(score_bias=spec.AlibiRule(before_scale=True)),
        note="with multi_query and new_decoder_architecture false. The scores are "
        "(q.k + bias) / sqrt(head_dim), the slopes in bfloat16",
    ),
    _falcon(
        name="falcon-7b",
        tensors=qkv_fused_by_projection("query_key_value", "dense", kv_heads="kv_heads"),
        beside=("rotary.inv_freq", "maybe_rotary.inv_freq", *_ANGLES),
        fixed=_ONE_KV_HEAD,
        function=_HALVES,
        note="with multi_query; its config may name other kv heads, which do not count",
    ),
    _falcon(
        name="falcon-40b",
        tensors=catalogue.qkv_fused_by_group("query_key_value") | output_projection("dense"),
        beside=("rotary.inv_freq", "maybe_rotary.inv_freq", *_ANGLES),
        function=_HALVES,
        note="with new_decoder_architecture: Falcon 40B, 180B, and Falcon 2",
    ),
    _no_class(
        name="internlm2",
        tensors=catalogue.qkv_fused_by_group("wqkv") | output_projection("wo"),
        where={"self": "model.layers.{layer}.attention."},
        beside=_ANGLES,
        function=_HALVES,
        source="vllm, vllm/model_executor/models/internlm2.py",
    ),
    describe_layout(
        name="mpt",
        tensors=qkv_fused_by_projection("Wqkv", "out_proj", bias=False),
        where={"self": "blocks.{layer}.attn."},
        function=AttentionSpec(score_bias=spec.AlibiRule(), clip=FROM_CONFIG),
        note="clip_qkv, where the config has it, clamps queries, keys and values",
    ),
    describe_layout(
        name="dbrx",
        tensors=qkv_fused_by_projection("Wqkv", "out_proj", kv_heads="kv_heads", bias=False),
        where={"self": "blocks.{layer}.norm_attn_norm.attn."},
        function=AttentionSpec(rotary=RotaryRule(), clip=FROM_CONFIG),
        note="clip_qkv, where the config has it, clamps queries, keys and values",
    ),
    describe_layout(
        name="phi3",
        tensors=qkv_fused_by_projection("qkv_proj", "o_proj", kv_heads="kv_heads", bias=False),
        where={"self": "model.layers.{layer}.self_attn."},
        beside=_ANGLES,
        function=AttentionSpec(rotary=RotaryRule(width=FROM_CONFIG), window=FROM_CONFIG),
        note="Phi-4 too; a part of a head is rotated where partial_rotary_factor says so",
    ),
    _no_class(
        name="chatglm2",
        tensors=qkv_fused_by_projection("query_key_value", "dense", kv_heads="kv_heads"),
        where={"self": "encoder.layers.{layer}.self_attention."},
        function=AttentionSpec(rotary=RotaryRule(width=FROM_CONFIG)),
        rows="interleaved",
        source="vllm, vllm/model_executor/models/chatglm.py",
        note="ChatGLM3, CodeGeeX2 and GLM-4's first files too. Half of a head is rotated; kv_heads "
        "is multi_query_group_num",
    ),
    _no_class(
        name="baichuan",
        tensors=qkv_fused_by_projection("W_pack", "o_proj", bias=False),
        where={"self": "model.layers.{layer}.self_attn."},
        beside=_ANGLES,
        function=AttentionSpec(rotary=FROM_CONFIG, score_bias=FROM_CONFIG),
        source="vllm, vllm/model_executor/models/baichuan.py",
        note="the 7B models rotate, half-split; the 13B models have ALiBi",
    ),
    describe_layout(
        name="olmo-native",
        tensors=qkv_fused_by_projection("att_proj", "attn_out", kv_heads="kv_heads"),
        where={"self": "blocks.{layer}."},
        beside=("attn_norm.*", "ff_norm.*", "ff_proj.*", "ff_out.*"),
        function=AttentionSpec(rotary=RotaryRule(), clip=FROM_CONFIG),
        source="allenai/OLMo, olmo/model.py",
        unchecked="its package is no dependency",
        note="clip_qkv, where the config has it, clamps queries, keys and values",
    ),
    describe_layout(
        name="molmo2",
        tensors=qkv_fused_by_projection("att_proj", "attn_out", kv_heads="kv_heads")
        | catalogue.head_norms("q_norm", "k_norm"),
        where={"self": "model.transformer.blocks.{layer}.self_attn."},
        function=AttentionSpec(rotary=RotaryRule(), qk_norm=NormRule()),
    ),
    describe_layout(
        name="gradium",
        tensors=qkv_fused_by_projection("in_proj", "o_proj", kv_heads="kv_heads", bias=False),
        where={"self": "model.layers.{layer}.self_attn."},
        function=_HALVES,
        rows="interleaved",
        model="gradium_phonon_tts",
    ),
)

LAYOUTS = (*_GPT, *_NEOX, *_GROUPED)
