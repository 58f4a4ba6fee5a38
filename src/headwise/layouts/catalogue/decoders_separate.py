"""Decoders with a matrix each for queries, keys and values: Llama, and what came of it."""

from __future__ import annotations

from dataclasses import replace

from headwise.layouts.forms import head_norms, out, outside, separate
from headwise.layouts.function import Function
from headwise.layouts.layout import Layout

_TRANSFORMERS = "transformers, models/"
_WHERE = {"self": "model.layers.{layer}.self_attn."}
_MASKS = ("bias", "masked_bias")
_ANGLES = ("rotary_emb.inv_freq",)

_LLAMA = separate("q_proj", "k_proj", "v_proj") | out("o_proj")
_ROTATED = Function(rotary="half-split", window=None)
_HEAD_NORMS = _LLAMA | head_norms("q_norm", "k_norm")

# The norms of queries and keys with a row for each head.
_ROWS_OF_NORMS = {
    "q_norm.weight": "q_norms: heads head_dim",
    "k_norm.weight": "k_norms: kv_heads head_dim",
}
_ROWS_OF_BIASES = {
    "q_norm.bias": "q_norms_bias: heads head_dim",
    "k_norm.bias": "k_norms_bias: kv_heads head_dim",
}

_GPT = (
    Layout(
        name="gptj",
        tensors=separate("q_proj", "k_proj", "v_proj", kv_heads="heads", biases="")
        | out("out_proj", bias=False),
        where={"self": "h.{layer}.attn."},
        beside=_MASKS,
        function=Function(rotary_width=None, rotary="interleaved"),
        source=f"{_TRANSFORMERS}gptj/modeling_gptj.py",
        note="the first rotary_dim channels of a head are rotated, 64 of 256",
    ),
    Layout(
        name="gpt-neo",
        tensors=separate("q_proj", "k_proj", "v_proj", kv_heads="heads", biases="")
        | out("out_proj"),
        where={"self": "h.{layer}.attn.attention."},
        beside=_MASKS,
        function=Function(scale="1", window=None),
        source=f"{_TRANSFORMERS}gpt_neo/modeling_gpt_neo.py",
        note="every other layer sees the last 256 tokens only",
    ),
    Layout(
        name="opt",
        tensors=separate("q_proj", "k_proj", "v_proj", kv_heads="heads") | out("out_proj"),
        where={"self": "decoder.layers.{layer}.self_attn."},
        source=f"{_TRANSFORMERS}opt/modeling_opt.py",
        note="XGLM has the same, as model.layers",
    ),
    Layout(
        name="phi",
        tensors=separate("q_proj", "k_proj", "v_proj") | out("dense"),
        where=_WHERE,
        beside=_ANGLES,
        function=Function(rotary_width=None, rotary="half-split"),
        source=f"{_TRANSFORMERS}phi/modeling_phi.py",
        note="Phi-1 to Phi-2. A part of a head is rotated",
    ),
)

_LLAMAS = (
    Layout(
        name="llama",
        tensors=_LLAMA,
        where=_WHERE,
        outside=outside(
            {
                "tokens": "model.embed_tokens.weight",
                "norm_1": "model.layers.{layer}.input_layernorm.weight",
                "norm_2": "model.layers.{layer}.post_attention_layernorm.weight",
                "gate": "model.layers.{layer}.mlp.gate_proj.weight",
                "up": "model.layers.{layer}.mlp.up_proj.weight",
                "down": "model.layers.{layer}.mlp.down_proj.weight",
                "final_norm": "model.norm.weight",
                "unembedding": "lm_head.weight",
            }
        ),
        beside=_ANGLES,
        function=_ROTATED,
        source=f"{_TRANSFORMERS}llama/modeling_llama.py",
        note="Mistral, Mixtral, Yi, TinyLlama, Gemma and OLMo have the same attention; OLMo may "
        "clamp queries, keys and values",
    ),
    Layout(
        name="llama-meta",
        tensors=separate("wq", "wk", "wv", biases="") | out("wo", bias=False),
        where={"self": "layers.{layer}.attention."},
        outside=outside(
            {
                "tokens": "tok_embeddings.weight",
                "norm_1": "layers.{layer}.attention_norm.weight",
                "norm_2": "layers.{layer}.ffn_norm.weight",
                "gate": "layers.{layer}.feed_forward.w1.weight",
                "up": "layers.{layer}.feed_forward.w3.weight",
                "down": "layers.{layer}.feed_forward.w2.weight",
                "final_norm": "norm.weight",
                "unembedding": "output.weight",
            }
        ),
        beside=("inner_attention.rope.freqs",),
        function=Function(rotary="interleaved", window=None),
        source="meta-llama/llama, llama/model.py",
        unchecked="its code is no package; a rotation by complex numbers, after its source, is run",
        note="Mistral's own files too. A model in several files is one to be joined first: wq, wk "
        "and wv by rows, wo by columns",
    ),
    Layout(
        name="qwen2",
        tensors=separate("q_proj", "k_proj", "v_proj") | out("o_proj", bias=False),
        where=_WHERE,
        beside=_ANGLES,
        function=_ROTATED,
        source=f"{_TRANSFORMERS}qwen2/modeling_qwen2.py",
        note="StableLM without norms has the same, and rotates a part of a head",
    ),
    Layout(
        name="starcoder2",
        tensors=_LLAMA,
        where=_WHERE,
        outside=outside(
            {
                "tokens": "model.embed_tokens.weight",
                "norm_1": "model.layers.{layer}.input_layernorm.weight",
                "norm_1_bias": "model.layers.{layer}.input_layernorm.bias",
                "norm_2": "model.layers.{layer}.post_attention_layernorm.weight",
                "norm_2_bias": "model.layers.{layer}.post_attention_layernorm.bias",
                "up": "model.layers.{layer}.mlp.c_fc.weight",
                "up_bias": "model.layers.{layer}.mlp.c_fc.bias",
                "down": "model.layers.{layer}.mlp.c_proj.weight",
                "down_bias": "model.layers.{layer}.mlp.c_proj.bias",
                "final_norm": "model.norm.weight",
                "final_norm_bias": "model.norm.bias",
                "unembedding": "lm_head.weight",
            }
        ),
        beside=_ANGLES,
        function=_ROTATED,
        source=f"{_TRANSFORMERS}starcoder2/modeling_starcoder2.py",
        note="Llama's attention, with all biases",
    ),
    Layout(
        name="nemotron",
        tensors=_LLAMA,
        where=_WHERE,
        beside=_ANGLES,
        function=Function(rotary_width=None, rotary="half-split"),
        source=f"{_TRANSFORMERS}nemotron/modeling_nemotron.py",
        note="Llama's attention; half of a head is rotated",
    ),
    Layout(
        name="granite",
        tensors=_LLAMA,
        where=_WHERE,
        beside=_ANGLES,
        function=Function(rotary="half-split", scale=None),
        source=f"{_TRANSFORMERS}granite/modeling_granite.py",
        note="the scale is attention_multiplier of its config",
    ),
    Layout(
        name="gpt-oss",
        tensors=_LLAMA | {"sinks": "sink: heads"},
        where=_WHERE,
        function=replace(_ROTATED, scale=None),
        source=f"{_TRANSFORMERS}gpt_oss/modeling_gpt_oss.py",
        note="every other layer has a window. Granite with windows has the names, and a scale of "
        "its own",
    ),
    Layout(
        name="gemma2",
        tensors=_LLAMA,
        where=_WHERE,
        beside=_ANGLES,
        function=Function(rotary="half-split", scale=None, softcap="tanh", window=None),
        source=f"{_TRANSFORMERS}gemma2/modeling_gemma2.py",
        note="the scale is 1/sqrt(query_pre_attn_scalar) of its config, the softcap "
        "attn_logit_softcapping",
    ),
)

_NEIGHBOURS = (
    Layout(
        name="cohere",
        tensors=_LLAMA,
        where=_WHERE,
        beside=_ANGLES,
        function=Function(rotary="interleaved", window=None),
        source=f"{_TRANSFORMERS}cohere/modeling_cohere.py",
        note="the names of Llama, another rotation: Command R, Helium, ERNIE 4.5. Cohere 2 does "
        "not rotate in its layers without a window",
    ),
    Layout(
        name="cohere-qk-norm",
        tensors=_LLAMA | _ROWS_OF_NORMS,
        where=_WHERE,
        beside=_ANGLES,
        function=Function(
            rotary="interleaved", qk_norm="layer over head, rows for heads, before rotary"
        ),
        source=f"{_TRANSFORMERS}cohere/modeling_cohere.py",
        note="with use_qk_norm: Command R+",
    ),
    Layout(
        name="glm",
        tensors=separate("q_proj", "k_proj", "v_proj") | out("o_proj", bias=False),
        where=_WHERE,
        beside=_ANGLES,
        function=Function(rotary_width=None, rotary="interleaved"),
        source=f"{_TRANSFORMERS}glm/modeling_glm.py",
        note="the names of Llama, another rotation, of half of a head",
    ),
)

_NORMED = (
    Layout(
        name="qwen3",
        tensors=_HEAD_NORMS,
        where=_WHERE,
        function=Function(rotary="half-split", qk_norm="rms over head, before rotary", window=None),
        source=f"{_TRANSFORMERS}qwen3/modeling_qwen3.py",
        note="the experts' models too",
    ),
    Layout(
        name="gemma3",
        tensors=_HEAD_NORMS,
        where=_WHERE,
        function=Function(
            rotary="half-split",
            scale=None,
            qk_norm="rms over head, weight + 1, before rotary",
            window=None,
        ),
        source=f"{_TRANSFORMERS}gemma3/modeling_gemma3.py",
        note="the scale is 1/sqrt(query_pre_attn_scalar) of its config; layers with a window have "
        "another theta",
    ),
    Layout(
        name="olmo2",
        tensors=_LLAMA
        | {
            "q_norm.weight": "q_norms: (heads head_dim)",
            "k_norm.weight": "k_norms: (kv_heads head_dim)",
        },
        where=_WHERE,
        function=Function(
            rotary="half-split", qk_norm="rms over width, before rotary", window=None
        ),
        source=f"{_TRANSFORMERS}olmo2/modeling_olmo2.py",
        note="OLMo 3 and OLMoE too",
    ),
    Layout(
        name="hunyuan",
        tensors=_LLAMA | head_norms("query_layernorm", "key_layernorm"),
        where=_WHERE,
        function=Function(rotary="half-split", qk_norm="rms over head, after rotary"),
        source=f"{_TRANSFORMERS}hunyuan_v1_dense/modeling_hunyuan_v1_dense.py",
        note="the experts' model too",
    ),
    Layout(
        name="lfm2",
        tensors=separate("q_proj", "k_proj", "v_proj", biases="")
        | out("out_proj", bias=False)
        | head_norms("q_layernorm", "k_layernorm"),
        where=_WHERE,
        function=Function(rotary="half-split", qk_norm="rms over head, before rotary"),
        source=f"{_TRANSFORMERS}lfm2/modeling_lfm2.py",
        note="only some of its layers are attention",
    ),
    Layout(
        name="chameleon",
        tensors=_LLAMA | _ROWS_OF_NORMS | _ROWS_OF_BIASES,
        where=_WHERE,
        beside=_ANGLES,
        function=Function(
            rotary="half-split", qk_norm="layer over head, rows for heads, before rotary"
        ),
        source=f"{_TRANSFORMERS}chameleon/modeling_chameleon.py",
    ),
)

LAYOUTS = (*_GPT, *_LLAMAS, *_NEIGHBOURS, *_NORMED)
