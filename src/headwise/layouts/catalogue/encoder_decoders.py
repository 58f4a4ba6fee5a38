"""Models of an encoder and a decoder that reads it, by the names in their files."""

from __future__ import annotations

from headwise.function.spec import AttentionSpec, BucketRule
from headwise.layouts._layout import Layout
from headwise.layouts.shared import Tensors, projections, transformers_layout

_T5 = projections("q k v o", source="source_dim", biases="") | {
    "relative_attention_bias.weight": "distances: buckets heads",
}
_T5_WHERE = {
    "encoder": "encoder.block.{layer}.layer.0.SelfAttention.",
    "decoder": "decoder.block.{layer}.layer.0.SelfAttention.",
    "cross": "decoder.block.{layer}.layer.1.EncDecAttention.",
}
_T5_FUNCTION = AttentionSpec(scale=1.0, score_bias=BucketRule())
_BART_WHERE = {
    "encoder": "encoder.layers.{layer}.self_attn.",
    "decoder": "decoder.layers.{layer}.self_attn.",
    "cross": "decoder.layers.{layer}.encoder_attn.",
}
# What a layer holds beside attention -> its axes; a bias has the first.
_AXES = {
    "self_norm": "embed_dim",
    "cross_norm": "embed_dim",
    "norm": "embed_dim",
    "up": "hidden_dim embed_dim",
    "down": "embed_dim hidden_dim",
}


def _layer_weights_outside_attention(side: str, prefix: str, places: dict[str, str]) -> Tensors:
    """Tensors of the layers of one side beside attention.

    ``places`` are the parts of `_AXES` and their stored names.
    """
    return {
        f"{prefix}{place}.{kind}": f"{side}_{part}{end}: {axes}"
        for part, place in places.items()
        for kind, end, axes in (
            ("weight", "", _AXES[part]),
            ("bias", "_bias", _AXES[part].split()[0]),
        )
    }


_BART_ENCODER = {
    "self_norm": "self_attn_layer_norm",
    "norm": "final_layer_norm",
    "up": "fc1",
    "down": "fc2",
}
_BART_DECODER = _BART_ENCODER | {"cross_norm": "encoder_attn_layer_norm"}
_WHISPER_ENCODER = {"self_norm": "attn_ln", "norm": "mlp_ln", "up": "mlp.0", "down": "mlp.2"}
_WHISPER_DECODER = _WHISPER_ENCODER | {"cross_norm": "cross_attn_ln"}
_BART_LAYERS = _layer_weights_outside_attention(
    "encoder", "encoder.layers.{layer}.", _BART_ENCODER
) | _layer_weights_outside_attention("decoder", "decoder.layers.{layer}.", _BART_DECODER)
_WHISPER_BESIDE_LAYERS = {
    "encoder_positions: places embed_dim": (
        "encoder.embed_positions.weight",
        "encoder.positional_embedding",
    ),
    "decoder_positions: places embed_dim": (
        "decoder.embed_positions.weight",
        "decoder.positional_embedding",
    ),
    "tokens: vocabulary embed_dim": (
        "decoder.embed_tokens.weight",
        "decoder.token_embedding.weight",
    ),
    "encoder_final_norm: embed_dim": ("encoder.layer_norm.weight", "encoder.ln_post.weight"),
    "encoder_final_norm_bias: embed_dim": ("encoder.layer_norm.bias", "encoder.ln_post.bias"),
    "decoder_final_norm: embed_dim": ("decoder.layer_norm.weight", "decoder.ln.weight"),
    "decoder_final_norm_bias: embed_dim": ("decoder.layer_norm.bias", "decoder.ln.bias"),
}

LAYOUTS = (
    transformers_layout(
        name="t5",
        tensors=_T5,
        where=_T5_WHERE,
        function=_T5_FUNCTION,
        mask="added",
        note="mT5, ByT5 and FLAN-T5 as well. The table of distances is in the first layer of each "
        "side and serves the others too; cross attention has none",
    ),
    transformers_layout(
        name="umt5",
        tensors=_T5,
        where=_T5_WHERE,
        function=_T5_FUNCTION,
        mask="added",
        note="T5's names; every layer of self attention has a table of distances of its own",
    ),
    transformers_layout(
        name="bart",
        tensors=projections("q_proj k_proj v_proj out_proj"),
        where=_BART_WHERE,
        outside=_BART_LAYERS,
        mask="added",
        note="mBART, Pegasus, M2M-100 and Marian as well",
    ),
    transformers_layout(
        name="whisper",
        tensors=projections("q_proj k_proj v_proj out_proj", biases="qvo"),
        where=_BART_WHERE,
        outside=_BART_LAYERS
        | {theirs: text for text, (theirs, _) in _WHISPER_BESIDE_LAYERS.items()},
        mask="added",
        note="keys have no bias. Everything stands below `model.`, which OpenAI's files lack",
    ),
    Layout(
        name="whisper-openai",
        tensors=projections("query key value out", biases="qvo"),
        where={
            "encoder": "encoder.blocks.{layer}.attn.",
            "decoder": "decoder.blocks.{layer}.attn.",
            "cross": "decoder.blocks.{layer}.cross_attn.",
        },
        outside=_layer_weights_outside_attention(
            "encoder", "encoder.blocks.{layer}.", _WHISPER_ENCODER
        )
        | _layer_weights_outside_attention("decoder", "decoder.blocks.{layer}.", _WHISPER_DECODER)
        | {whisper_name: text for text, (_, whisper_name) in _WHISPER_BESIDE_LAYERS.items()},
        mask="added",
        source="openai/whisper, whisper/model.py",
        unchecked="openai-whisper is not among the packages of the tests; its 20250625 was run "
        "once, by hand, as a whole model",
        note="queries and keys are scaled by head_dim**-1/4 each",
    ),
    Layout(
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
