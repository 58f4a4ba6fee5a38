"""Decoders with a matrix each for queries, keys and values: Llama, and what came of it."""

from dataclasses import replace
from functools import partial
from typing import Any

from headwise.function.spec import (
    ABSENT,
    FROM_CONFIG,
    AttentionSpec,
    NormRule,
    RotaryRule,
    Softcap,
    ValueRule,
)
from headwise.function.weights import LAMBDAS
from headwise.layouts import catalogue
from headwise.layouts._layout import Layout
from headwise.layouts.catalogue import describe_layout, head_norms, left_to_config, projections

_WHERE = {"self": "model.layers.{layer}.self_attn."}
_MASKS = ("bias", "masked_bias")
_ANGLES = ("rotary_emb.inv_freq",)

_LLAMA = projections("q_proj k_proj v_proj o_proj", kv_heads="kv_heads")
_ROTATED = left_to_config("window temperature", rotary=RotaryRule())
_HEAD_NORMS = _LLAMA | head_norms("q_norm", "k_norm")

# The norms of queries and keys with a row for each head.
_ROWS_OF_NORMS = {
    "q_norm.weight": "q_norms: heads head_dim",
    "k_norm.weight": "k_norms: kv_heads head_dim",
}
_WIDE_NORMS = {
    "q_norm.weight": "q_norms: (heads head_dim)",
    "k_norm.weight": "k_norms: (kv_heads head_dim)",
}
_ROWS_OF_BIASES = {
    "q_norm.bias": "q_norms_bias: heads head_dim",
    "k_norm.bias": "k_norms_bias: kv_heads head_dim",
}

META = (
    "tokens=tok_embeddings.weight final_norm=norm.weight unembedding=output.weight | "
    "layers.{layer}. norm_1=attention_norm.weight norm_2=ffn_norm.weight "
    "gate=feed_forward.w1.weight up=feed_forward.w3.weight down=feed_forward.w2.weight"
)


def _llama_like_layout(name: str, function: AttentionSpec, note: str = "", **others: Any) -> Layout:
    usual = {"tensors": _LLAMA, "where": _WHERE, "beside": _ANGLES}
    return describe_layout(name, function=function, note=note, **(usual | others))


_GPT = (
    describe_layout(
        name="gptj",
        tensors=projections("q_proj k_proj v_proj out_proj", biases=""),
        where={"self": "h.{layer}.attn."},
        beside=_MASKS,
        function=AttentionSpec(rotary=RotaryRule(width=FROM_CONFIG)),
        rows="interleaved",
        note="the first rotary_dim channels of a head are rotated, 64 of 256",
    ),
    describe_layout(
        name="gpt-neo",
        tensors=projections("q_proj k_proj v_proj out_proj", biases="o"),
        where={"self": "h.{layer}.attn.attention."},
        beside=_MASKS,
        function=AttentionSpec(scale=1.0, window=FROM_CONFIG),
        note="every other layer sees the last 256 tokens only",
    ),
    describe_layout(
        name="opt",
        tensors=projections("q_proj k_proj v_proj out_proj"),
        where={"self": "decoder.layers.{layer}.self_attn."},
        note="XGLM has the same, as model.layers",
    ),
    _llama_like_layout(
        "phi",
        left_to_config("qk_norm", rotary=RotaryRule(width=FROM_CONFIG)),
        "Phi-1 to Phi-2. A part of a head is rotated; layer norms of queries and keys are there "
        "with qk_layernorm",
        tensors=projections("q_proj k_proj v_proj dense", kv_heads="kv_heads")
        | head_norms("q_layernorm", "k_layernorm", bias=True),
    ),
)

_LLAMAS = (
    _llama_like_layout(
        "llama",
        _ROTATED,
        "Mistral, Mixtral, Yi, TinyLlama, Gemma and OLMo have the same attention; OLMo may "
        "clamp queries, keys and values",
        outside="tokens=model.embed_tokens.weight final_norm=model.norm.weight "
        "unembedding=lm_head.weight | model.layers.{layer}. norm_1=input_layernorm.weight "
        "norm_2=post_attention_layernorm.weight gate=mlp.gate_proj.weight up=mlp.up_proj.weight "
        "down=mlp.down_proj.weight",
    ),
    describe_layout(
        name="llama-meta",
        tensors=projections("wq wk wv wo", kv_heads="kv_heads", biases=""),
        where={"self": "layers.{layer}.attention."},
        root="",
        outside=META,
        beside=("inner_attention.rope.freqs",),
        function=AttentionSpec(rotary=RotaryRule(), window=FROM_CONFIG),
        rows="interleaved",
        source="meta-llama/llama, llama/model.py",
        sharded=catalogue.TENSOR_PARALLEL,
        sharded_also={"tok_embeddings.weight": "embed_dim"},
        unchecked="its code is no package; a rotation by complex numbers, after its source, is run",
        note="Mistral's own files too. Llama 1 and 2 divide the columns of tok_embeddings over "
        "processes, Llama 3 its rows",
    ),
    _llama_like_layout(
        "diffllama",
        replace(_ROTATED, differential=FROM_CONFIG, temperature=ABSENT, window=ABSENT),
        "outputs of a pair of heads stand side by side in the columns of o_proj",
        tensors=_LLAMA | {name: f"{name}: lambda_dim" for name in LAMBDAS},
    ),
    _llama_like_layout(
        "qwen2",
        _ROTATED,
        "StableLM without norms has the same, and rotates a part of a head",
        tensors=projections("q_proj k_proj v_proj o_proj", kv_heads="kv_heads", biases="qkv"),
    ),
    _llama_like_layout(
        "starcoder2",
        _ROTATED,
        "Llama's attention, with all biases",
        outside="tokens=model.embed_tokens.weight final_norm=model.norm.* "
        "unembedding=lm_head.weight | model.layers.{layer}. norm_1=input_layernorm.* "
        "norm_2=post_attention_layernorm.* up=mlp.c_fc.* down=mlp.c_proj.*",
    ),
    _llama_like_layout(
        "nemotron",
        AttentionSpec(rotary=RotaryRule(width=FROM_CONFIG), window=FROM_CONFIG),
        "Llama's attention; half of a head is rotated. Recurrent Gemma has a window",
    ),
    _llama_like_layout(
        "granite",
        AttentionSpec(rotary=RotaryRule(), scale=FROM_CONFIG),
        "the scale is attention_multiplier of its config",
    ),
    _llama_like_layout(
        "gpt-oss",
        replace(_ROTATED, scale=FROM_CONFIG),
        "every other layer has a window. Granite with windows has the names, and a scale of "
        "its own",
        tensors=_LLAMA | {"sinks": "sink: heads"},
        beside=(),
    ),
    _llama_like_layout(
        "openai-privacy-filter",
        _ROTATED,
        "the names of gpt-oss, another rotation; all layers have a window to both sides",
        tensors=_LLAMA | {"sinks": "sink: heads"},
        rows="interleaved",
        beside=(),
    ),
    _llama_like_layout(
        "dia",
        AttentionSpec(scale=1.0, rotary=RotaryRule()),
        "Llama's attention; its scores are not scaled",
        where={
            "self": "layers.{layer}.self_attention.",
            "cross": "layers.{layer}.cross_attention.",
        },
    ),
    describe_layout(
        name="moshi",
        tensors=projections(
            "q_proj.linear k_proj.linear v_proj.linear o_proj.linear",
            kv_heads="kv_heads",
            biases="",
        ),
        where=_WHERE,
        function=_ROTATED,
        note="Llama's attention. Kyutai's speech to text too",
    ),
    describe_layout(
        name="nemotron-audio",
        tensors=projections("q_proj k_proj v_proj o_proj", kv_heads="kv_heads")
        | head_norms("q_norm", "k_norm", bias=True),
        where={"self": "layers.{layer}.self_attn."},
        function=AttentionSpec(rotary=RotaryRule(width=FROM_CONFIG), qk_norm=NormRule("layer")),
        model="nemotron3_5_transcribe",
        note="the encoders of Nemotron 3.5 Transcribe",
    ),
    describe_layout(
        name="cosmos3",
        tensors=projections("to_q to_k to_v to_out", kv_heads="kv_heads")
        | head_norms("norm_q", "norm_k"),
        where={"self": "language_model.layers.{layer}.self_attn."},
        function=AttentionSpec(rotary=RotaryRule(), qk_norm=FROM_CONFIG),
        model="cosmos3_omni",
        note="Qwen 3's attention; Cosmos 3 Edge has no norms. A rotation by time, row and column",
    ),
    describe_layout(
        name="ctrl",
        tensors=projections("Wq Wk Wv dense"),
        where={"self": "h.{layer}.multi_head_attention."},
    ),
    _llama_like_layout(
        "gemma2",
        left_to_config("scale window", rotary=RotaryRule(), softcap=Softcap()),
        "the scale is 1/sqrt(query_pre_attn_scalar) of its config, the softcap "
        "attn_logit_softcapping",
    ),
)

_NEIGHBOURS = (
    _llama_like_layout(
        "cohere",
        AttentionSpec(rotary=RotaryRule(), window=FROM_CONFIG),
        "the names of Llama, another rotation: Command R, Helium, ERNIE 4.5. Cohere 2 does "
        "not rotate in its layers without a window",
        rows="interleaved",
    ),
    _llama_like_layout(
        "cohere-qk-norm",
        AttentionSpec(rotary=RotaryRule(), qk_norm=NormRule("layer", has_rows=True)),
        "with use_qk_norm: Command R+",
        tensors=_LLAMA | _ROWS_OF_NORMS,
        model="cohere",
        rows="interleaved",
    ),
    _llama_like_layout(
        "glm",
        AttentionSpec(rotary=RotaryRule(width=FROM_CONFIG)),
        "the names of Llama, another rotation, of half of a head",
        tensors=projections("q_proj k_proj v_proj o_proj", kv_heads="kv_heads", biases="qkv"),
        rows="interleaved",
    ),
)

_UNWEIGHTED = (
    _llama_like_layout(
        "llama4",
        left_to_config(
            "temperature", rotary=RotaryRule(), qk_norm=NormRule(place="after", has_weight=False)
        ),
        "the names of Llama, another rotation. Layers that do not rotate have no norm, and a "
        "temperature by position; transformers counts columns there",
        rows="interleaved",
    ),
    _llama_like_layout(
        "nanochat",
        AttentionSpec(
            rotary=RotaryRule(backwards=True), qk_norm=NormRule(place="after", has_weight=False)
        ),
        "the names of Llama; pairs turn by minus the angle",
        beside=(),
    ),
)

_OUTPUTS = (
    _llama_like_layout(
        "bitnet",
        AttentionSpec(rotary=RotaryRule(), output_norm=NormRule(over="width")),
        "Llama's attention, with a norm before the output projection",
        tensors=_LLAMA | {"attn_sub_norm.weight": "o_norms: (heads head_dim)"},
    ),
    describe_layout(
        name="kosmos2",
        model="kosmos_2",
        tensors=projections("q_proj k_proj v_proj out_proj")
        | {
            "inner_attn_ln.weight": "o_norms: (heads head_dim)",
            "inner_attn_ln.bias": "o_norms_bias: (heads head_dim)",
        },
        where={"self": "text_model.model.layers.{layer}.self_attn."},
        function=AttentionSpec(output_norm=NormRule("layer", over="width")),
        note="a layer norm before the output projection",
    ),
)
_VALUES = (
    _llama_like_layout(
        "gemma4",
        left_to_config(
            "window",
            scale=1.0,
            rotary=RotaryRule(),
            qk_norm=NormRule(),
            values=ValueRule(FROM_CONFIG),
        ),
        "values have a norm without weight. Layers without a window may have no v_proj "
        "(attention_k_eq_v): values are projected keys. Gemma 3n has the same",
        tensors=_HEAD_NORMS,
        optional=("wv",),
    ),
    _llama_like_layout(
        "mimo",
        left_to_config(
            "window", rotary=RotaryRule(width=FROM_CONFIG), values=ValueRule(factor=FROM_CONFIG)
        ),
        "values have channels of their own number, and a factor; sinks in layers with a window",
        tensors=projections("q_proj k_proj v_proj o_proj", kv_heads="kv_heads", value="value_dim")
        | {"attention_sink_bias": "sink: heads"},
        optional=("sink",),
        model="mimo_v2_flash",
    ),
)

_plain = partial(_llama_like_layout, beside=())
_NORMED = (
    _plain(
        "qwen3",
        AttentionSpec(rotary=RotaryRule(), qk_norm=NormRule(), window=FROM_CONFIG),
        "the experts' models too",
        tensors=_HEAD_NORMS,
    ),
    _plain(
        "gemma3",
        left_to_config("scale window", rotary=RotaryRule(), qk_norm=NormRule(weight_offset=1.0)),
        "the scale is 1/sqrt(query_pre_attn_scalar) of its config; layers with a window have "
        "another theta",
        tensors=_HEAD_NORMS,
    ),
    _plain(
        "olmo2",
        AttentionSpec(rotary=RotaryRule(), qk_norm=NormRule(over="width"), window=FROM_CONFIG),
        "OLMo 3 and OLMoE too",
        tensors=_LLAMA | _WIDE_NORMS,
    ),
    _plain(
        "flint",
        AttentionSpec(rotary=RotaryRule(), qk_norm=NormRule(), window=FROM_CONFIG),
        "Qwen 3's attention with sinks; layers without a window do not rotate",
        tensors=_HEAD_NORMS | {"softmax_offset": "sink: heads"},
    ),
    _plain(
        "esmc",
        AttentionSpec(rotary=RotaryRule(), qk_norm=NormRule("layer", over="width")),
        "the norms have no bias",
        tensors=_LLAMA | _WIDE_NORMS,
    ),
    _plain(
        "hunyuan",
        AttentionSpec(rotary=RotaryRule(), qk_norm=NormRule(place="after")),
        "the experts' model too",
        tensors=_LLAMA | head_norms("query_layernorm", "key_layernorm"),
        model="hunyuan_v1_dense",
    ),
    _plain(
        "lfm2",
        AttentionSpec(rotary=RotaryRule(), qk_norm=NormRule()),
        "only some of its layers are attention",
        tensors=projections("q_proj k_proj v_proj out_proj", kv_heads="kv_heads", biases="")
        | head_norms("q_layernorm", "k_layernorm"),
    ),
    _llama_like_layout(
        "chameleon",
        AttentionSpec(rotary=RotaryRule(), qk_norm=NormRule("layer", has_rows=True)),
        tensors=_LLAMA | _ROWS_OF_NORMS | _ROWS_OF_BIASES,
    ),
)

LAYOUTS = (*_GPT, *_LLAMAS, *_NEIGHBOURS, *_UNWEIGHTED, *_OUTPUTS, *_VALUES, *_NORMED)
