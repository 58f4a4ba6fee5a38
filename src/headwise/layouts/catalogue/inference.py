"""Formats and engines of inference: GGUF, CTranslate2, vLLM, TensorRT-LLM and MLX."""

from functools import partial

from headwise.function.spec import AttentionSpec, RotaryRule
from headwise.layouts import catalogue
from headwise.layouts.catalogue import describe_layout, left_to_config, qkv_fused_by_projection

_GGUF = (
    "tokens=token_embd.weight positions=position_embd.weight final_norm=output_norm.* "
    "unembedding=output.weight | blk.{layer}. norm_1=attn_norm.* norm_2=ffn_norm.* "
    "gate=ffn_gate.weight up=ffn_up.* down=ffn_down.*"
)
_gguf = partial(
    describe_layout,
    where={"self": "blk.{layer}."},
    root="",
    outside=_GGUF,
    # A block's tensors have one prefix: those of attention, and all others.
    beside=("ffn_*", "attn_norm*", "post_*", "layer_output_norm*"),
    source="ggml-org/llama.cpp, convert_hf_to_gguf.py",
)
_GGUF_SEPARATE = catalogue.projections("attn_q attn_k attn_v attn_output", kv_heads="kv_heads")
_READ = (
    "tensors in floating point, with their axes as numpy has them: a GGUF file lists them reversed"
)
_BY_HAND = "no package runs one layer of it by itself"

LAYOUTS = (
    _gguf(
        name="gguf-llama",
        tensors=_GGUF_SEPARATE,
        function=AttentionSpec(rotary=RotaryRule()),
        rows="interleaved",
        note="GGUF of the architecture llama, and of those that llama.cpp turns as it does: rows "
        f"of queries and keys are not in Hugging Face's order; {_READ}",
    ),
    _gguf(
        name="gguf-qwen2",
        tensors=_GGUF_SEPARATE
        | catalogue.head_norms("attn_q_norm", "attn_k_norm")
        | {"attn_sinks.weight": "sink: heads"},
        optional=("sink",),
        function=left_to_config("qk_norm softcap window", rotary=RotaryRule()),
        note="GGUF of architectures whose rows are kept as Hugging Face has them: qwen2, qwen3, "
        "gemma, starcoder2, gpt-oss. Names and shapes are those of gguf-llama: the field "
        f"general.architecture tells; {_READ}",
    ),
    _gguf(
        name="gguf-fused",
        tensors=qkv_fused_by_projection("attn_qkv", "attn_output", kv_heads="kv_heads"),
        function=left_to_config("rotary score_bias window"),
        note="GGUF of gpt2, phi3, bloom, falcon and gptneox: queries, keys and values one after "
        f"the other, whatever order they were fused in before; {_READ}",
    ),
    describe_layout(
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
        root="",
        beside=("*layer_norm/*", "*_norm/*"),
        function=left_to_config("scale rotary score_bias qk_norm window"),
        source="OpenNMT/CTranslate2, python/ctranslate2/specs/attention_spec.py",
        unchecked=_BY_HAND,
        note="self-attention of a model.bin; missing biases are filled with zeros. Rows of GPT-J, "
        "CodeGen and Meta's Llama are re-ordered to half-split",
    ),
    describe_layout(
        name="vllm",
        tensors=qkv_fused_by_projection("qkv_proj", "o_proj", kv_heads="kv_heads")
        | catalogue.head_norms("q_norm", "k_norm"),
        where={"self": "model.layers.{layer}.self_attn."},
        outside="tokens=model.embed_tokens.weight final_norm=model.norm.weight "
        "unembedding=lm_head.weight | model.layers.{layer}. norm_1=input_layernorm.weight "
        "norm_2=post_attention_layernorm.weight down=mlp.down_proj.weight "
        "gate+up=mlp.gate_up_proj.weight",
        function=left_to_config("rotary softcap qk_norm window"),
        source="vllm-project/vllm, vllm/model_executor/layers/linear.py, QKVParallelLinear",
        unchecked="its modules run on a GPU only",
        note="as vLLM and SGLang hold a Llama in memory, in one tensor-parallel rank; each of "
        "several has rows of its own heads",
    ),
    describe_layout(
        name="tensorrt-llm",
        tensors=qkv_fused_by_projection("qkv", "dense", kv_heads="kv_heads")
        | catalogue.head_norms("q_layernorm", "k_layernorm", bias=True)
        | {"attention_sinks": "sink: heads"},
        optional=("sink",),
        where={"self": "transformer.layers.{layer}.attention."},
        root="",
        beside=("kv_cache_*", "rotary_inv_freq", "embed_positions*"),
        function=left_to_config("scale rotary score_bias qk_norm window"),
        source="NVIDIA/TensorRT-LLM, tensorrt_llm/layers/attention.py",
        unchecked="its layers are built into an engine for a GPU only",
        note="what its convert_checkpoint.py writes for one rank; each of several has rows of its "
        "own heads",
    ),
    describe_layout(
        name="mlx",
        tensors=catalogue.projections("query_proj key_proj value_proj out_proj", **catalogue.APART),
        where={"self": "layers.{layer}.attention."},
        mask="added",
        source="ml-explore/mlx, python/mlx/nn/layers/transformer.py",
        note="mlx.nn.MultiHeadAttention; the language models of mlx-lm keep the names and the "
        "order of Hugging Face. Tested on request: pip install headwise[libraries]",
    ),
)
