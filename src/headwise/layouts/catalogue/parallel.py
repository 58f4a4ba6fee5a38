"""Frameworks that train in parallel: Megatron, and what follows or feeds it.

Their tensors are those of one process that holds the whole model. The shares of several
tensor-parallel processes are joined where a layout names the axes that they divide.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from headwise.function.spec import FROM_CONFIG, AttentionSpec, Pairing, RotaryRule
from headwise.layouts import catalogue
from headwise.layouts._layout import Layout
from headwise.layouts.catalogue import describe_layout, output_projection, qkv_fused_by_projection

# How Megatron-LM calls its layers. In 1 to 3 positions are learned, and nothing is normalised.
_LEGACY: dict[str, Any] = {
    "mask": "True hides",
    "axes": "length batch width",
    "beside": ("*_extra_state",),
    "sharded": catalogue.TENSOR_PARALLEL,
}
_OPEN = catalogue.left_to_config("rotary qk_norm window")
_CORE = "NVIDIA/Megatron-LM, megatron/core/transformer/attention.py"
_megatron = partial(describe_layout, function=_OPEN, source=_CORE, **_LEGACY)
_engine = partial(
    _megatron,
    axes=None,
    sharded=(),
    source="NVIDIA/TransformerEngine, transformer_engine/pytorch/attention/multi_head_attention.py",
    unchecked="its modules run on a GPU of NVIDIA's only",
)
_NEEDS_A_CLUSTER = "its layers are built only within its own parallel runtime"
_MAY_TURN = "Rotary is half-split unless rotary_interleaved is set."
_ON_REQUEST = "Tested on request: pip install headwise[libraries]"
_OUTSIDE_OF_MEGATRON = (
    "tokens=embedding.word_embeddings.weight positions=embedding.position_embeddings.weight "
    "final_norm=decoder.final_layernorm.* unembedding=output_layer.weight | "
    "decoder.layers.{layer}. norm_1=self_attention.linear_qkv.layer_norm_* "
    "norm_2=mlp.linear_fc1.layer_norm_* down=mlp.linear_fc2.*"
)
_GATED_MLP = " gate+up=mlp.linear_fc1.weight"
_PLAIN_MLP = " up=mlp.linear_fc1.*"
_MEGATRON_OUT = output_projection("linear_proj")
_MEGATRON_NORMS = catalogue.head_norms("q_layernorm", "k_layernorm", bias=True)
_core = partial(_megatron, where={"self": "decoder.layers.{layer}.self_attention."})

_GROUPED = catalogue.qkv_fused_by_group("linear_qkv") | _MEGATRON_OUT | _MEGATRON_NORMS
_MEGATRON_CORE = (
    _core(
        name="megatron",
        tensors=_GROUPED,
        outside=_OUTSIDE_OF_MEGATRON + _GATED_MLP,
        note="of Megatron core, for models with a gated MLP such as Llama; NeMo fuses the same "
        f"way. {_MAY_TURN} {_ON_REQUEST}",
    ),
    _core(
        name="megatron-gpt",
        tensors=_GROUPED,
        outside=_OUTSIDE_OF_MEGATRON + _PLAIN_MLP,
        note="of Megatron core, for models with an MLP of two matrices such as GPT. "
        f"{_MAY_TURN} {_ON_REQUEST}",
    ),
    _core(
        name="megatron-gated",
        tensors=catalogue.fused_projection_by_pattern(
            "linear_qkv",
            "(kv_heads [wq: group head_dim | wg: group head_dim | wk: head_dim | wv: head_dim])",
            bias=False,
        )
        | _MEGATRON_OUT
        | _MEGATRON_NORMS,
        outside=_OUTSIDE_OF_MEGATRON + _GATED_MLP,
        function=replace(_OPEN, output_gate="channel"),
        source=f"{_CORE}, attention_output_gate",
        unchecked="no release with attention_output_gate was run beside it",
        note="each head's outputs are multiplied by the sigmoid of a gate of their own",
    ),
    _megatron(
        name="megatron-cross",
        tensors={
            "linear_q.weight": "wq: (heads head_dim) embed_dim",
            "linear_kv.weight": "(kv_heads [wk: head_dim | wv: head_dim]) source_dim",
            "linear_q.bias": "bq: (heads head_dim)",
            "linear_kv.bias": "(kv_heads [bk: head_dim | bv: head_dim])",
        }
        | _MEGATRON_OUT,
        where={"cross": "decoder.layers.{layer}.cross_attention."},
        note="of Megatron core, beside megatron or megatron-gpt. " + _ON_REQUEST,
    ),
)


def _legacy_megatron_layout(
    number: int, version: str, module: str, fused: catalogue.Tensors
) -> Layout:
    """Return an order that Megatron-LM fused in, by its checkpoint_version."""
    blocks = module.partition(".")[0]
    return describe_layout(
        name=f"megatron-v{number}",
        tensors=fused | output_projection("dense"),
        where={"self": module},
        outside="tokens=embedding.word_embeddings.weight "
        f"positions=embedding.position_embeddings.weight final_norm={blocks}.final_layernorm.* | "
        f"{blocks}.layers.{{layer}}. norm_1=input_layernorm.* "
        "norm_2=post_attention_layernorm.* up=mlp.dense_h_to_4h.* down=mlp.dense_4h_to_h.*",
        **_LEGACY,
        source="NVIDIA/Megatron-LM, megatron/checkpointing.py, fix_query_key_value_ordering",
        unchecked="the versions that wrote it do not run with today's torch",
        note=f"of Megatron-LM before its core, checkpoint_version {version}: the file "
        "says it, names and shapes do not. The module is called attention within transformer "
        "in older files, self_attention within encoder in newer ones",
    )


_FUSED, _OLD_MODULE = "query_key_value", "transformer.layers.{layer}.attention."
_BY_CHANNEL = catalogue.fused_projection_by_pattern(_FUSED, "(heads head_dim [wq: | wk: | wv: ])")
_NEW_MODULE = "encoder.layers.{layer}.self_attention."
_LEGACY_LAYOUTS = (
    _legacy_megatron_layout(0, "0", _OLD_MODULE, qkv_fused_by_projection(_FUSED)),
    _legacy_megatron_layout(1, "1.0", _OLD_MODULE, _BY_CHANNEL),
    _legacy_megatron_layout(2, "2.0 and later", _NEW_MODULE, catalogue.qkv_fused_by_head(_FUSED)),
)

_TE_REST = output_projection("proj") | catalogue.head_norms("q_norm", "k_norm", bias=True)
_ENGINE = (
    _engine(
        name="transformer-engine",
        tensors=catalogue.qkv_fused_by_group("qkv") | _TE_REST,
        note="MultiheadAttention with fuse_qkv_params=True, qkv_weight_interleaved=True; "
        "rotary is half-split unless rotary_pos_interleaved is set",
    ),
    _engine(
        name="transformer-engine-stacked",
        tensors=qkv_fused_by_projection("qkv", kv_heads="kv_heads") | _TE_REST,
        note="MultiheadAttention with fuse_qkv_params=True, qkv_weight_interleaved=False; "
        "same names and shapes as transformer-engine",
    ),
    _engine(
        name="transformer-engine-separate",
        tensors=catalogue.projections(
            "qkv.query qkv.key qkv.value", kv_heads="kv_heads", leaves=("_weight", "_bias")
        )
        | _TE_REST,
        note="MultiheadAttention with fuse_qkv_params=False, as it is by default",
    ),
    _engine(
        name="transformer-engine-layer",
        tensors=catalogue.qkv_fused_by_group("layernorm_qkv") | _TE_REST,
        where={"self": "layers.{layer}.self_attention."},
        outside="| layers.{layer}. norm_1=self_attention.layernorm_qkv.layer_norm_* "
        "norm_2=layernorm_mlp.layer_norm_* down=layernorm_mlp.fc2_* "
        "gate+up=layernorm_mlp.fc1_weight",
        note="TransformerLayer with fuse_qkv_params=True and activation swiglu",
        source="NVIDIA/TransformerEngine, transformer_engine/pytorch/transformer.py",
    ),
)


def _nanotron_layout(pairing: Pairing) -> Layout:
    interleaved = pairing == "interleaved"
    return describe_layout(
        name="nanotron-interleaved" if interleaved else "nanotron",
        tensors=qkv_fused_by_projection("qkv_proj", "o_proj", kv_heads="kv_heads", bias=False),
        where={"self": "model.decoder.{layer}.pp_block.attn."},
        outside="tokens=model.token_position_embeddings.pp_block.token_embedding.weight "
        "final_norm=model.final_layer_norm.pp_block.weight "
        "unembedding=model.lm_head.pp_block.weight | model.decoder.{layer}.pp_block. "
        "norm_1=input_layernorm.weight norm_2=post_attention_layernorm.weight "
        "down=mlp.down_proj.weight gate+up=mlp.gate_up_proj.weight",
        beside=("*inv_freq", "*freqs_cis"),
        function=AttentionSpec(rotary=RotaryRule()),
        rows=pairing,
        source="huggingface/nanotron, src/nanotron/models/llama.py",
        unchecked=_NEEDS_A_CLUSTER,
        note=f"with rope_interleaved={interleaved} in its config; names and shapes do not tell",
    )


LAYOUTS = (
    *_MEGATRON_CORE,
    *_LEGACY_LAYOUTS,
    *_ENGINE,
    describe_layout(
        name="neox-gqa",
        tensors=qkv_fused_by_projection("query_key_value", "dense", kv_heads="kv_heads"),
        beside=("*inv_freq",),
        function=AttentionSpec(rotary=RotaryRule(width=FROM_CONFIG)),
        axes="length batch width",
        mask="True hides",
        source="EleutherAI/gpt-neox, megatron/model/transformer.py, gqa_project",
        unchecked=_NEEDS_A_CLUSTER,
        note="GPT-NeoX's own files with num_kv_heads; without it they are fused as in neox. Layers "
        "are numbered with what stands before them, so a module's place is not told",
    ),
    describe_layout(
        name="metaseq",
        tensors=catalogue.fused_projection_by_pattern(
            "qkv_proj", "([wk: heads head_dim | wv: heads head_dim | wq: heads head_dim])"
        )
        | output_projection("out_proj"),
        where={"self": "decoder.layers.{layer}.self_attn."},
        axes="length batch width",
        mask="added",
        source="facebookresearch/metaseq, metaseq/model_parallel/modules/multihead_attention.py",
        unchecked=_NEEDS_A_CLUSTER,
        note="the first files of OPT, after their shares were joined: all keys, all values, all "
        "queries, in spite of the name. Hugging Face's files of OPT are opt",
    ),
    _nanotron_layout("half-split"),
    _nanotron_layout("interleaved"),
)
