"""Encoders of text and of speech, by the names in their files."""

from functools import partial

from headwise.function.spec import (
    FROM_CONFIG,
    TRANSFORMER_XL,
    AttentionSpec,
    BucketRule,
    Other,
    RotaryRule,
)
from headwise.layouts import catalogue
from headwise.layouts.catalogue import describe_layout, output_projection, projections

_BERT = (
    "tokens=embeddings.word_embeddings.weight positions=embeddings.position_embeddings.weight "
    "token_types=embeddings.token_type_embeddings.weight embed_norm=embeddings.LayerNorm.* "
    "pooler=pooler.dense.* | encoder.layer.{layer}. norm_1=attention.output.LayerNorm.* "
    "norm_2=output.LayerNorm.* up=intermediate.dense.* down=output.dense.*"
)
_SEPARATE = projections("self.query self.key self.value output.dense")
_WHERE = {"self": "encoder.layer.{layer}.attention."}
_NORM = ("output.LayerNorm.*",)  # behind the residual; in old files its parts are gamma and beta

_encoder = partial(describe_layout, mask="added")
_deberta = partial(
    describe_layout,
    where=_WHERE,
    outside=catalogue.weights_outside_attention(_BERT)
    | {
        "encoder.rel_embeddings.weight": "place_table: buckets embed_dim",
        "encoder.LayerNorm.weight": "place_norm: embed_dim",
        "encoder.LayerNorm.bias": "place_norm_bias: embed_dim",
    },
    function=AttentionSpec(scale=FROM_CONFIG, score_bias=FROM_CONFIG),
    mask="True attends",
)

LAYOUTS = (
    _encoder(
        name="bert",
        tensors=_SEPARATE,
        where=_WHERE | {"cross": "encoder.layer.{layer}.crossattention."},
        outside=_BERT,
        beside=(*_NORM, "ln.*", "self_attn_layer_norm.*"),
        note="RoBERTa, ELECTRA, MiniLM and most that came of BERT. The norm of each block follows "
        "it, as in nn.TransformerEncoder with norm_first=False",
    ),
    _encoder(
        name="albert",
        tensors=projections("query key value dense"),
        where={"self": "encoder.albert_layer_groups.{stage}.albert_layers.{layer}.attention."},
        beside=("LayerNorm.*",),
        note="one layer may serve as several. The norm follows the residual",
    ),
    _encoder(
        name="qformer",
        tensors=projections(
            "attention.query attention.key attention.value output.dense", source="source_dim"
        ),
        where={
            "self": "encoder.layer.{layer}.attention.",
            "cross": "encoder.layer.{layer}.crossattention.",
        },
        beside=_NORM,
        model="blip_2",
        note="InstructBLIP as well. Only some layers cross",
    ),
    _encoder(
        name="distilbert",
        tensors=projections("q_lin k_lin v_lin out_lin"),
        where={"self": "transformer.layer.{layer}.attention."},
        outside="tokens=embeddings.word_embeddings.weight "
        "positions=embeddings.position_embeddings.weight embed_norm=embeddings.LayerNorm.* | "
        "transformer.layer.{layer}. norm_1=sa_layer_norm.* norm_2=output_layer_norm.* "
        "up=ffn.lin1.* down=ffn.lin2.*",
        note="BERT's blocks; queries are divided by sqrt(head_dim) before the product",
    ),
    _encoder(
        name="mpnet",
        tensors=projections("attn.q attn.k attn.v attn.o"),
        where=_WHERE,
        outside=catalogue.weights_outside_attention(
            _BERT.replace("attention.output.LayerNorm", "attention.LayerNorm")
        )
        | {"encoder.relative_attention_bias.weight": "distances: buckets heads"},
        beside=("LayerNorm.*",),
        function=AttentionSpec(score_bias=BucketRule()),
        note="one table of distances, encoder.relative_attention_bias, serves all layers, by T5's "
        "rule; a conversion passes it on as it is",
    ),
    _encoder(
        name="esm",
        tensors=_SEPARATE,
        where=_WHERE,
        beside=("self.rotary_embeddings.inv_freq", "LayerNorm.*"),
        function=AttentionSpec(rotary=FROM_CONFIG),
        note="BERT's names. ESM-2's queries and keys are rotated, half-split; ESM-1b's are not",
    ),
    describe_layout(
        name="esm-meta",
        tensors=projections("q_proj k_proj v_proj out_proj"),
        where={"self": "layers.{layer}.self_attn."},
        beside=("rot_emb.inv_freq",),
        marks=("rot_emb.inv_freq",),
        function=AttentionSpec(rotary=RotaryRule()),
        mask="True hides",
        axes="length batch width",
        source="facebookresearch/esm, esm/multihead_attention.py",
        note="ESM-2's own files. Tested on request: pip install headwise[libraries]",
    ),
    _encoder(
        name="longformer",
        tensors=_SEPARATE,
        where=_WHERE,
        outside=_BERT,
        beside=(*_NORM, "self.query_global.*", "self.key_global.*", "self.value_global.*"),
        marks=("self.query_global.weight",),
        function=AttentionSpec(window=Other("both sides, and global tokens")),
        note="BERT's names. Global tokens see all, by projections of their own, which are passed "
        "on as they are; all tokens see them. The check has a window, and no global tokens",
    ),
    _deberta(
        name="deberta",
        tensors={
            "self.in_proj.weight": catalogue.qkv_fused_by_head("")[".weight"],
            "self.q_bias": "bq: (heads head_dim)",
            "self.v_bias": "bv: (heads head_dim)",
            **output_projection("output.dense"),
            "self.pos_proj.weight": "wpk: (heads head_dim) embed_dim",
            "self.pos_q_proj.weight": "wpq: (heads head_dim) embed_dim",
            "self.pos_q_proj.bias": "bpq: (heads head_dim)",
        },
        beside=_NORM,
        note="DeBERTa v1. With pos_att_type the scale is 1/sqrt((1 + its length) head_dim), and "
        "terms of the distance are added. One table of places, encoder.rel_embeddings, serves all "
        "layers; a conversion passes it on as it is",
    ),
    _deberta(
        name="deberta-v2",
        tensors=projections("self.query_proj self.key_proj self.value_proj output.dense")
        | {
            "self.pos_key_proj.weight": "wpk: (heads head_dim) embed_dim",
            "self.pos_key_proj.bias": "bpk: (heads head_dim)",
            "self.pos_query_proj.weight": "wpq: (heads head_dim) embed_dim",
            "self.pos_query_proj.bias": "bpq: (heads head_dim)",
        },
        beside=_NORM,
        note="DeBERTa v2 and v3; the scale and the terms are as in v1. In v3 query_proj and "
        "key_proj serve the table of places too, behind its norm, encoder.LayerNorm",
    ),
    describe_layout(
        name="modernbert",
        tensors=catalogue.qkv_fused_by_projection("Wqkv", "Wo"),
        where={"self": "layers.{layer}.attn."},
        outside="tokens=embeddings.tok_embeddings.weight final_norm=final_norm.weight | "
        "layers.{layer}. norm_1=attn_norm.weight norm_2=mlp_norm.weight down=mlp.Wo.weight",
        beside=("rotary_emb.*",),
        function=AttentionSpec(rotary=RotaryRule(), window=FROM_CONFIG),
        note="most layers see a window to both sides; theta differs between them and the others",
    ),
    describe_layout(
        name="modernbert-decoder",
        tensors=projections("q_proj k_proj v_proj Wo"),
        where={"self": "layers.{layer}.attn."},
        function=AttentionSpec(rotary=RotaryRule(), window=FROM_CONFIG),
    ),
    describe_layout(
        name="xlnet",
        tensors={
            "q": "wq: embed_dim heads head_dim",
            "k": "wk: embed_dim heads head_dim",
            "v": "wv: embed_dim heads head_dim",
            "o": "wo: out_dim heads head_dim",
        },
        where={"self": "layer.{layer}.rel_attn."},
        beside=("r", "r_w_bias", "r_r_bias", "r_s_bias", "seg_embed", "layer_norm.*"),
        function=AttentionSpec(score_bias=TRANSFORMER_XL),
        mask="True hides",
        axes="length batch width",
        note="all matrices, o among them, are (width, heads, head_dim). Keys of the distances and "
        "biases of the queries are passed on as they are; the check has them at 0",
    ),
    _encoder(
        name="conformer",
        tensors=projections("linear_q linear_k linear_v linear_out"),
        where={"self": "encoder.layers.{layer}.self_attn."},
        beside=("linear_pos.weight", "pos_bias_u", "pos_bias_v", "distance_embedding.weight"),
        function=AttentionSpec(rotary=FROM_CONFIG, score_bias=FROM_CONFIG),
        model="wav2vec2_conformer",
        note="Wav2Vec2-Conformer and Wav2Vec2-BERT; ESPnet and NeMo use the names as well. What "
        "belongs to relative positions is passed on as it is",
    ),
    _encoder(
        name="wav2vec2",
        tensors=projections("q_proj k_proj v_proj out_proj"),
        where={"self": "encoder.layers.{layer}.attention."},
        outside="| encoder.layers.{layer}. norm_1=layer_norm.* norm_2=final_layer_norm.* "
        "up=feed_forward.intermediate_dense.* down=feed_forward.output_dense.*",
        note="HuBERT and UniSpeech as well",
    ),
)
