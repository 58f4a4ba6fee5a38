"""Models of an encoder and a decoder that reads it, by the names in their files."""

from functools import partial

from headwise.function.spec import AttentionSpec, BucketRule
from headwise.layouts.catalogue import both_sides, describe_layout, projections

_T5 = projections("q k v o", source="source_dim", biases="") | {
    "relative_attention_bias.weight": "distances: buckets heads"
}
_PIX2STRUCT = projections("query key value output", source="source_dim", biases="")
_T5_WHERE = both_sides("{side}.block.{layer}.layer.", "0.SelfAttention.", "1.EncDecAttention.")
_T5_FUNCTION = AttentionSpec(scale=1.0, score_bias=BucketRule())
_BART_WHERE = both_sides("{side}.layers.{layer}.", "self_attn.", "encoder_attn.")
_BART_LAYERS = (
    " | encoder.layers.{layer}. encoder_self_norm=self_attn_layer_norm.* "
    "encoder_norm=final_layer_norm.* encoder_up=fc1.* encoder_down=fc2.* | "
    "decoder.layers.{layer}. decoder_self_norm=self_attn_layer_norm.* "
    "decoder_norm=final_layer_norm.* decoder_up=fc1.* decoder_down=fc2.* "
    "decoder_cross_norm=encoder_attn_layer_norm.*"
)

_model = partial(describe_layout, mask="added")
_t5 = partial(describe_layout, tensors=_T5, where=_T5_WHERE, function=_T5_FUNCTION, mask="added")

LAYOUTS = (
    _t5(
        name="t5",
        note="mT5, ByT5 and FLAN-T5 as well. The table of distances is in the first layer of each "
        "side and serves the others too; cross attention has none",
    ),
    _t5(
        name="umt5",
        note="T5's names; every layer of self attention has a table of distances of its own",
    ),
    _t5(
        name="pix2struct",
        tensors=_PIX2STRUCT | {"relative_attention_bias.weight": "distances: buckets heads"},
        where={"decoder": "layer.{layer}.self_attention.attention."},
        note="T5's attention; the table of distances of the first layer serves the others too",
    ),
    describe_layout(
        name="pix2struct-cross",
        tensors=_PIX2STRUCT,
        where={
            "cross": "layer.{layer}.encoder_decoder_attention.attention.",
            "encoder": "encoder.layer.{layer}.attention.",
        },
        function=AttentionSpec(scale=1.0),
        model="pix2struct",
        note="cross attention, and the attention of the image part: no distances",
    ),
    _model(
        name="bart",
        tensors=projections("q_proj k_proj v_proj out_proj"),
        where=_BART_WHERE,
        outside=_BART_LAYERS,
        note="mBART, Pegasus, M2M-100 and Marian as well",
    ),
    _model(
        name="whisper",
        tensors=projections("q_proj k_proj v_proj out_proj", biases="qvo"),
        where=_BART_WHERE,
        outside="encoder_positions=encoder.embed_positions.weight "
        "decoder_positions=decoder.embed_positions.weight tokens=decoder.embed_tokens.weight "
        "encoder_final_norm=encoder.layer_norm.* decoder_final_norm=decoder.layer_norm.*"
        + _BART_LAYERS,
        note="keys have no bias. Everything stands below `model.`, which OpenAI's files lack",
    ),
    _model(
        name="whisper-openai",
        tensors=projections("query key value out", biases="qvo"),
        where=both_sides("{side}.blocks.{layer}.", "attn.", "cross_attn."),
        root="",
        outside="encoder_positions=encoder.positional_embedding "
        "decoder_positions=decoder.positional_embedding tokens=decoder.token_embedding.weight "
        "encoder_final_norm=encoder.ln_post.* decoder_final_norm=decoder.ln.* | "
        "encoder.blocks.{layer}. encoder_self_norm=attn_ln.* encoder_norm=mlp_ln.* "
        "encoder_up=mlp.0.* encoder_down=mlp.2.* | decoder.blocks.{layer}. "
        "decoder_self_norm=attn_ln.* decoder_norm=mlp_ln.* decoder_up=mlp.0.* "
        "decoder_down=mlp.2.* decoder_cross_norm=cross_attn_ln.*",
        source="openai/whisper, whisper/model.py",
        unchecked="openai-whisper is not among the packages of the tests; its 20250625 was run "
        "once, by hand, as a whole model",
        note="queries and keys are scaled by head_dim**-1/4 each",
    ),
    describe_layout(
        name="sockeye-cross",
        tensors={
            "ff_q.weight": "wq: (heads head_dim) embed_dim",
            "ff_kv.weight": "(heads [wk: head_dim | wv: head_dim]) source_dim",
            "ff_out.weight": "wo: out_dim (heads head_dim)",
        },
        where={"cross": "decoder.layers.{layer}.enc_attention."},
        mask="True hides",
        axes="length batch width",
        source="awslabs/sockeye, sockeye/layers.py",
        unchecked="sockeye is not among the packages of the tests; its 3.1.34 was run once, by "
        "hand",
        note="Sockeye 3, as its files are: for each head its key and its value. Its self attention "
        "has all queries first and then the same, in one matrix, which patterns cannot say",
    ),
)
