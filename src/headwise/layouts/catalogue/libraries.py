"""Libraries of PyTorch: for interpreting, for training, and for building models of parts."""

from functools import partial
from typing import Any

from headwise.function import spec
from headwise.function.spec import ABSENT, FROM_CONFIG, AttentionSpec, Pairing, RotaryRule
from headwise.layouts import catalogue
from headwise.layouts._layout import Layout
from headwise.layouts.catalogue import OPEN, describe_layout, projections, qkv_fused_by_projection
from headwise.layouts.catalogue.decoders_separate import META

_ON_REQUEST = "tested on request: pip install headwise[libraries]"
_IN_ITS_OWN = "tested on request, in an environment of its own"
_NOT_RELEASED = "no release of it has this layout yet"


def _transformer_lens_tensors(k: str = "") -> dict[str, str]:
    """HookedTransformer's: an axis for each name; GQA's keys and values have an underscore."""
    kv_heads = "kv_heads" if k else "heads"
    return {
        "W_Q": "wq: heads embed_dim head_dim",
        f"{k}W_K": f"wk: {kv_heads} embed_dim head_dim",
        f"{k}W_V": f"wv: {kv_heads} embed_dim head_dim",
        "W_O": "wo: heads head_dim out_dim",
        "b_Q": "bq: heads head_dim",
        f"{k}b_K": f"bk: {kv_heads} head_dim",
        f"{k}b_V": f"bv: {kv_heads} head_dim",
        "b_O": "bo: out_dim",
        "q_norm.w": "q_norm: head_dim",
        "k_norm.w": "k_norm: head_dim",
        "sinks": "sink: heads",
    }


_lens = partial(
    describe_layout,
    where={"self": "blocks.{layer}.attn."},
    root="",
    beside=("mask", "IGNORE", "rotary_sin", "rotary_cos"),
    optional=("sink",),
)
_LENS_BLOCKS = catalogue.weights_outside_attention(
    "| blocks.{layer}. norm_1=ln1.w* norm_2=ln2.w* gate=mlp.W_gate up=mlp.W_in "
    "up_bias=mlp.b_in down=mlp.W_out down_bias=mlp.b_out",
    columns=True,
)
_LENS_DECODER = {
    **_LENS_BLOCKS,
    **catalogue.weights_outside_attention(
        "tokens=embed.W_E positions=pos_embed.W_pos final_norm=ln_final.w*"
    ),
    "unembed.W_U": "unembedding: embed_dim vocabulary",
}
_LENS_ENCODER = _LENS_BLOCKS | catalogue.weights_outside_attention(
    "tokens=embed.embed.W_E positions=embed.pos_embed.W_pos "
    "token_types=embed.token_type_embed.W_token_type embed_norm=embed.ln.w* pooler=pooler.W "
    "pooler_bias=pooler.b",
    columns=True,
)
_LENS_SOURCE = "TransformerLens 3, transformer_lens/components/abstract_attention.py"
_AS_IT_WAS = (
    "only as loaded by from_pretrained_no_processing: otherwise norms and biases are folded into "
    "the weights, and the writing weights are centred. attn_scale is what scores are divided by"
)
_FLASH_SOURCE = "Dao-AILab/flash-attention, flash_attn/modules/mha.py"
_FLASH_DECODER = (
    "tokens=transformer.embeddings.word_embeddings.weight "
    "positions=transformer.embeddings.position_embeddings.weight final_norm=transformer.ln_f.* "
    "unembedding=lm_head.weight | transformer.layers.{layer}. norm_1=norm1.* norm_2=norm2.* "
    "down=mlp.fc2.* "
)
_FLASH_OPEN = catalogue.left_to_config("rotary score_bias softcap window")
_FLASH_CROSS = {
    "Wq.weight": "wq: (heads head_dim) embed_dim",
    "Wkv.weight": "([wk: kv_heads head_dim | wv: kv_heads head_dim]) source_dim",
    "Wq.bias": "bq: (heads head_dim)",
    "Wkv.bias": "([bk: kv_heads head_dim | bv: kv_heads head_dim])",
}
_FLASH_GPT: dict[str, Any] = {"where": {"self": "transformer.layers.{layer}.mixer."}, "root": ""}
_FLASH_ATTN = (
    describe_layout(
        name="flash-attn",
        tensors=qkv_fused_by_projection("Wqkv", "out_proj", kv_heads="kv_heads"),
        **_FLASH_GPT,
        outside=_FLASH_DECODER + "up=mlp.fc1.*",
        beside=("rotary_emb.*",),
        function=_FLASH_OPEN,
        source=f"{_FLASH_SOURCE} and flash_attn/models/gpt.py",
        note="MHA, in its GPT-2, GPT-NeoX and OPT; rotary is half-split unless "
        "rotary_emb_interleaved is set. " + _IN_ITS_OWN,
    ),
    describe_layout(
        name="flash-attn-llama",
        tensors=qkv_fused_by_projection("Wqkv", "out_proj", kv_heads="kv_heads"),
        **_FLASH_GPT,
        outside=_FLASH_DECODER + "up+gate=mlp.fc1.weight",
        beside=("rotary_emb.*",),
        function=AttentionSpec(rotary=RotaryRule(), window=FROM_CONFIG),
        rows="interleaved",
        source=f"{_FLASH_SOURCE} and flash_attn/models/llama.py",
        note="MHA with rotary_emb_interleaved, in its Llama; the MLP fuses up before gate. "
        + _IN_ITS_OWN,
    ),
    describe_layout(
        name="flash-attn-bert",
        tensors=qkv_fused_by_projection("Wqkv", "out_proj"),
        where={"self": "encoder.layers.{layer}.mixer."},
        outside="tokens=embeddings.word_embeddings.weight "
        "positions=embeddings.position_embeddings.weight "
        "token_types=embeddings.token_type_embeddings.weight embed_norm=emb_ln.* "
        "pooler=pooler.dense.* | encoder.layers.{layer}. norm_1=norm1.* norm_2=norm2.* "
        "up=mlp.fc1.* down=mlp.fc2.*",
        source=f"{_FLASH_SOURCE} and flash_attn/models/bert.py",
        note="MHA, in its BERT. " + _IN_ITS_OWN,
    ),
    describe_layout(
        name="flash-attn-cross",
        tensors=_FLASH_CROSS | catalogue.output_projection("out_proj"),
        beside=("rotary_emb.*",),
        function=_FLASH_OPEN,
        source=_FLASH_SOURCE,
        note="MHA with cross_attn=True. " + _IN_ITS_OWN,
    ),
)


def _x_describe_layout(*, rotates: bool) -> Layout:
    return describe_layout(
        name="x-transformers-rotary" if rotates else "x-transformers",
        tensors={
            "to_q.weight": "wq: (group kv_heads head_dim) embed_dim",
            "to_k.weight": "wk: (kv_heads head_dim) source_dim",
            "to_v.weight": "wv: (kv_heads value_dim) source_dim",
            "to_out.weight": "wo: out_dim (group kv_heads value_dim)",
            "mem_k": "extra_k: kv_heads () head_dim",
            "mem_v": "extra_v: kv_heads () value_dim",
            "attend.head_attn_sink": "sink: (group kv_heads)",
        },
        optional=("extra_k", "extra_v", "sink"),
        function=AttentionSpec(rotary=RotaryRule(width=FROM_CONFIG) if rotates else ABSENT),
        rows="interleaved" if rotates else "half-split",
        mask="True attends",
        source="lucidrains/x-transformers, x_transformers/x_transformers.py and attend.py",
        note="query head h reads kv head h % kv_heads, against everyone's h // group. Layers are "
        "numbered with those of the MLP between them, so a module's place is not told. mem_k and "
        "mem_v are num_mem_kv=1"
        + ("; with rotary_pos_emb=True, of which inv_freq is a buffer" if rotates else ""),
    )


def _torchtune_layout(*, rows: Pairing) -> Layout:
    return describe_layout(
        name="torchtune" if rows == "interleaved" else "torchtune-qwen2",
        tensors=projections("q_proj k_proj v_proj output_proj", kv_heads="kv_heads")
        | catalogue.head_norms("q_norm", "k_norm", leaf="scale"),
        where={"self": "layers.{layer}.attn."},
        outside="tokens=tok_embeddings.weight final_norm=norm.scale unembedding=output.weight | "
        "layers.{layer}. norm_1=sa_norm.scale norm_2=mlp_norm.scale gate=mlp.w1.weight "
        "up=mlp.w3.weight down=mlp.w2.weight",
        beside=("kv_cache.*", "pos_embeddings.*"),
        function=catalogue.left_to_config("scale softcap qk_norm window", rotary=RotaryRule()),
        rows=rows,
        mask="True attends",
        source="pytorch/torchtune, torchtune/modules/attention.py",
        note=(
            "of Llama, Mistral and Gemma; the names say q_proj, the order is Meta's. "
            if rows == "interleaved"
            else "of Qwen 2 and 3: names and shapes are those of torchtune, the order is another. "
        )
        + _IN_ITS_OWN,
    )


def _litgpt_layout(*, legacy: bool) -> Layout:
    fuse = (
        catalogue.qkv_fused_by_group("attn")
        if legacy
        else qkv_fused_by_projection("qkv", kv_heads="kv_heads")
    )
    return describe_layout(
        name="litgpt-legacy" if legacy else "litgpt",
        tensors=fuse
        | catalogue.output_projection("proj")
        | catalogue.head_norms("norm_q", "norm_k"),
        where={"self": "transformer.h.{layer}.attn."},
        root="",
        outside="tokens=transformer.wte.weight final_norm=transformer.ln_f.* "
        "unembedding=lm_head.weight | transformer.h.{layer}. norm_1=norm_1.* norm_2=norm_2.* "
        "gate=mlp.fc_1.weight up=mlp.fc_2.weight down=mlp.proj.weight",
        beside=("kv_cache.*",),
        function=catalogue.left_to_config(
            "scale softcap qk_norm window", rotary=RotaryRule(width=FROM_CONFIG)
        ),
        source="Lightning-AI/litgpt, litgpt/model.py, CausalSelfAttention",
        note=(
            "before the layer was called qkv: each kv head with the queries that read it. "
            if legacy
            else "models with a gated MLP, such as Llama, and without rope_interleave. "
        )
        + _IN_ITS_OWN,
    )


_llama3 = partial(
    describe_layout,
    where={"self": "layers.{layer}.attention."},
    outside=META,
    function=AttentionSpec(rotary=RotaryRule()),
    rows="interleaved",
)

LAYOUTS = (
    _lens(
        name="transformer-lens",
        tensors=_transformer_lens_tensors(),
        outside=_LENS_DECODER,
        function=OPEN,
        source=_LENS_SOURCE,
        note=f"HookedTransformer, {_AS_IT_WAS}. {_IN_ITS_OWN}",
    ),
    _lens(
        name="transformer-lens-gqa",
        tensors=_transformer_lens_tensors("_"),
        outside=_LENS_DECODER,
        function=OPEN,
        source="TransformerLens 3, transformer_lens/components/grouped_query_attention.py",
        note=f"HookedTransformer with n_key_value_heads, {_AS_IT_WAS}. {_IN_ITS_OWN}",
    ),
    _lens(
        name="transformer-lens-encoder",
        tensors=_transformer_lens_tensors(),
        outside=_LENS_ENCODER,
        function=catalogue.left_to_config("scale qk_norm"),
        source="TransformerLens 3, transformer_lens/HookedEncoder.py",
        note="HookedEncoder, which is BERT: its norms stand behind attention and MLP. "
        + _IN_ITS_OWN,
    ),
    _x_describe_layout(rotates=False),
    _x_describe_layout(rotates=True),
    *_FLASH_ATTN,
    describe_layout(
        name="diffusers",
        tensors=projections("to_q to_k to_v to_out.0", kv_heads="kv_heads", source="source_dim")
        | catalogue.head_norms("norm_q", "norm_k", bias=True),
        where={
            "self": "transformer_blocks.{layer}.attn1.",
            "cross": "transformer_blocks.{layer}.attn2.",
        },
        function=AttentionSpec(rotary=FROM_CONFIG, qk_norm=FROM_CONFIG),
        mask="added",
        source="huggingface/diffusers, src/diffusers/models/attention_processor.py",
        note=f"of U-Nets and of transformers with cross-attention. {_ON_REQUEST}",
    ),
    describe_layout(
        name="flux",
        tensors=qkv_fused_by_projection("qkv", "proj")
        | catalogue.head_norms("norm.query_norm", "norm.key_norm", leaf="scale"),
        where={"self": "double_blocks.{layer}.img_attn."},
        function=AttentionSpec(rotary=spec.Other("by row and column"), qk_norm=spec.NormRule()),
        rows="interleaved",
        source="black-forest-labs/flux, src/flux/modules/layers.py",
        unchecked="no package has it; a layer after its source is run, rotated by place",
        note="img_attn and txt_attn: tokens of both attend to the keys of both, which no one layer "
        "does. Single blocks fuse an MLP with it, in linear1 and linear2, and have no layout",
    ),
    *(
        describe_layout(
            name=f"curated-transformers{kind}",
            tensors=tensors | catalogue.output_projection("output"),
            where={"self": "layers.{layer}.mha."},
            beside=("rotary_embeds.*",),
            function=AttentionSpec(rotary=FROM_CONFIG, score_bias=FROM_CONFIG),
            mask="True attends",
            source="explosion/curated-transformers, curated_transformers/layers/attention.py",
            note=f"SelfAttention with {spoken}; rotary is half-split. {_ON_REQUEST}",
        )
        for kind, tensors, spoken in (
            ("", projections("query key value", kv_heads="kv_heads"), "QkvMode.SEPARATE"),
            (
                "-stacked",
                qkv_fused_by_projection("input", kv_heads="kv_heads"),
                "QkvSplitGroupedByHead",
            ),
            (
                "-grouped",
                catalogue.qkv_fused_by_group("input"),
                "QkvSplitGroupedByKVHeads, or MERGED_SPLIT_BEFORE",
            ),
        )
    ),
    _torchtune_layout(rows="interleaved"),
    _torchtune_layout(rows="half-split"),
    _llama3(
        name="torchtitan",
        tensors=projections("qkv_linear.wq qkv_linear.wk qkv_linear.wv wo", kv_heads="kv_heads"),
        source="pytorch/torchtitan, torchtitan/models/common/attention.py",
        unchecked=_NOT_RELEASED,
        note="of Llama 3, as it is today; before, its files were in llama-meta's layout. Models "
        "with norms of queries and keys, such as Qwen 3, have the other pairing",
    ),
    _llama3(
        name="gpt-fast",
        tensors=qkv_fused_by_projection("wqkv", "wo", kv_heads="kv_heads", bias=False),
        root="",
        beside=("kv_cache.*",),
        mask="True attends",
        source="pytorch-labs/gpt-fast, model.py",
        unchecked="it is a script, not a package",
    ),
    _litgpt_layout(legacy=False),
    _litgpt_layout(legacy=True),
)
