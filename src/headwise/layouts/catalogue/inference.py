"""Formats and engines of inference: GGUF, CTranslate2, vLLM and MLX."""

from __future__ import annotations

from headwise.function.spec import FROM_CONFIG, AttentionSpec, RotaryRule
from headwise.layouts._layout import Layout
from headwise.layouts.shared import (
    APART,
    head_norms,
    projections,
    qkv_fused_by_projection,
    weights_outside_attention,
)

_GATE_AND_UP = "([gate: hidden_dim | up: hidden_dim]) embed_dim"
_BLOCK = "blk.{layer}."
_GGUF = weights_outside_attention(
    tokens="token_embd.weight",
    positions="position_embd.weight",
    norm_1=_BLOCK + "attn_norm.*",
    norm_2=_BLOCK + "ffn_norm.*",
    gate=_BLOCK + "ffn_gate.weight",
    up=_BLOCK + "ffn_up.*",
    down=_BLOCK + "ffn_down.*",
    final_norm="output_norm.*",
    unembedding="output.weight",
)
# A block's tensors have one prefix: those of attention, and all others.
_BESIDE = ("ffn_*", "attn_norm*", "post_*", "layer_output_norm*")
_GGUF_SEPARATE = projections("attn_q attn_k attn_v attn_output", kv_heads="kv_heads")
_READ = (
    "tensors in floating point, with their axes as numpy has them: a GGUF file lists them reversed"
)
_LLAMA_CPP = "ggml-org/llama.cpp, convert_hf_to_gguf.py"
_BY_HAND = "no package runs one layer of it by itself"

LAYOUTS = (
    Layout(
        name="gguf-llama",
        tensors=_GGUF_SEPARATE,
        where={"self": _BLOCK},
        outside=_GGUF,
        beside=_BESIDE,
        function=AttentionSpec(rotary=RotaryRule()),
        rows="interleaved",
        source=_LLAMA_CPP,
        note="GGUF of the architecture llama, and of those that llama.cpp turns as it does: rows "
        f"of queries and keys are not in Hugging Face's order; {_READ}",
    ),
    Layout(
        name="gguf-qwen2",
        tensors=_GGUF_SEPARATE
        | head_norms("attn_q_norm", "attn_k_norm")
        | {"attn_sinks.weight": "sink: heads"},
        optional=("sink",),
        where={"self": _BLOCK},
        outside=_GGUF,
        beside=_BESIDE,
        function=AttentionSpec(
            rotary=RotaryRule(), qk_norm=FROM_CONFIG, softcap=FROM_CONFIG, window=FROM_CONFIG
        ),
        source=_LLAMA_CPP,
        note="GGUF of architectures whose rows are kept as Hugging Face has them: qwen2, qwen3, "
        "gemma, starcoder2, gpt-oss. Names and shapes are those of gguf-llama: the field "
        f"general.architecture tells; {_READ}",
    ),
    Layout(
        name="gguf-fused",
        tensors=qkv_fused_by_projection("attn_qkv", "attn_output", kv_heads="kv_heads"),
        where={"self": _BLOCK},
        outside=_GGUF,
        beside=_BESIDE,
        function=AttentionSpec(rotary=FROM_CONFIG, score_bias=FROM_CONFIG, window=FROM_CONFIG),
        source=_LLAMA_CPP,
        note="GGUF of gpt2, phi3, bloom, falcon and gptneox: queries, keys and values one after "
        f"the other, whatever order they were fused in before; {_READ}",
    ),
    Layout(
        name="ctranslate2",
        tensors={
            name.replace(".", "/"): pattern
            for name, pattern in (
                qkv_fused_by_projection("linear_0", "linear_1", kv_heads="kv_heads")
            ).items()
        },
        where={
            "self": "decoder/layer_{layer}/self_attention/",
            "encoder": "encoder/layer_{layer}/self_attention/",
        },
        beside=("*layer_norm/*", "*_norm/*"),
        function=AttentionSpec(
            scale=FROM_CONFIG,
            rotary=FROM_CONFIG,
            score_bias=FROM_CONFIG,
            qk_norm=FROM_CONFIG,
            window=FROM_CONFIG,
        ),
        source="OpenNMT/CTranslate2, python/ctranslate2/specs/attention_spec.py",
        unchecked=_BY_HAND,
        note="self-attention of a model.bin; missing biases are filled with zeros. Rows of GPT-J, "
        "CodeGen and Meta's Llama are re-ordered to half-split",
    ),
    Layout(
        name="vllm",
        tensors=qkv_fused_by_projection("qkv_proj", "o_proj", kv_heads="kv_heads")
        | head_norms("q_norm", "k_norm"),
        where={"self": "model.layers.{layer}.self_attn."},
        outside=weights_outside_attention(
            tokens="model.embed_tokens.weight",
            norm_1="model.layers.{layer}.input_layernorm.weight",
            norm_2="model.layers.{layer}.post_attention_layernorm.weight",
            down="model.layers.{layer}.mlp.down_proj.weight",
            final_norm="model.norm.weight",
            unembedding="lm_head.weight",
        )
        | {"model.layers.{layer}.mlp.gate_up_proj.weight": _GATE_AND_UP},
        function=AttentionSpec(
            rotary=FROM_CONFIG, softcap=FROM_CONFIG, qk_norm=FROM_CONFIG, window=FROM_CONFIG
        ),
        source="vllm-project/vllm, vllm/model_executor/layers/linear.py, QKVParallelLinear",
        unchecked="its modules run on a GPU only",
        note="as vLLM and SGLang hold a Llama in memory, in one tensor-parallel rank; each of "
        "several has rows of its own heads",
    ),
    Layout(
        name="mlx",
        tensors=projections("query_proj key_proj value_proj out_proj", **APART),
        where={"self": "layers.{layer}.attention."},
        mask="added",
        source="ml-explore/mlx, python/mlx/nn/layers/transformer.py",
        note="mlx.nn.MultiHeadAttention; the language models of mlx-lm keep the names and the "
        "order of Hugging Face. Tested on request: pip install headwise[libraries]",
    ),
)
