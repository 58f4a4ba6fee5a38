"""Encoders of text and of speech: the real classes of transformers, and the files they write.

ESM's own class is tested on request: pip install -e ".[dev,libraries]".
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise import Mask, Rotary
from headwise.layouts.plan import convert
from tests.layouts.real import BATCH, LENGTH, Real, assert_same_function, inputs, sharpen
from tests.layouts.stored import (
    HEADS,
    ROTATED,
    SINGLE,
    VOCABULARY,
    WIDTHS,
    file_of,
    left_open,
    model_of,
    own_tensors,
    within,
    written,
)

SIX_ROTATED = {"num_heads": 6, "rotary": Rotary()}
EVERYWHERE = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)
SPEECH: dict[str, Any] = WIDTHS | {
    "conv_dim": (8,),
    "conv_kernel": (3,),
    "conv_stride": (2,),
    "num_feat_extract_layers": 1,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}


def in_two(attention: Any, x: Tensor, **options: Any) -> Tensor:
    """What BERT and those after it call attention, without the residual and norm of its output."""
    heads = attention.self(x, **options)[0]
    outputs: Tensor = attention.output.dense(heads)
    return outputs.detach()


def bert() -> Real:
    model = model_of("Bert", **WIDTHS, vocab_size=VOCABULARY)
    x = inputs(40)
    outputs = in_two(within(model, "layer.1.attention"), x)
    return Real(written(model, "bert", layer=1), x, outputs, HEADS)


def bert_of(kind: str) -> Real:
    """Those that share BERT's names."""
    model = model_of(kind, **WIDTHS, vocab_size=VOCABULARY, pad_token_id=0)
    x = inputs(40)
    outputs = in_two(within(model, "layer.1.attention"), x)
    return Real(written(model, "bert", layer=1), x, outputs, HEADS)


def distilbert() -> Real:
    model = model_of(
        "DistilBert", dim=40, n_heads=8, n_layers=2, hidden_dim=52, vocab_size=VOCABULARY
    )
    x = inputs(40)
    outputs = within(model, "layer.1.attention")(x)[0].detach()
    return Real(written(model, "distilbert", layer=1), x, outputs, HEADS)


def mpnet() -> Real:
    model = model_of("MPNet", **WIDTHS, vocab_size=VOCABULARY)
    x = inputs(40)
    outputs = within(model, "layer.1.attention.attn")(x)[0].detach()
    return Real(written(model, "mpnet", layer=1), x, outputs, HEADS)


def esm() -> Real:
    model = model_of(
        "Esm", **ROTATED, vocab_size=VOCABULARY, pad_token_id=0, position_embedding_type="rotary"
    )
    x, attention = inputs(60), within(model, "layer.1.attention")
    turns = model.rotary_embeddings(x, torch.arange(LENGTH)[None])
    outputs = in_two(attention, x, position_embeddings=turns)
    return Real(written(model, "esm", layer=1), x, outputs, SIX_ROTATED, unit=SINGLE)


@torch.no_grad()
def esm_meta() -> Real:
    library = pytest.importorskip("esm.multihead_attention")
    layer = library.MultiheadAttention(60, 6, self_attention=True, use_rotary_embeddings=True)
    layer = layer.double().eval()
    sharpen(layer)
    x = inputs(60)
    turned = x.transpose(0, 1)
    outputs = layer(turned, turned, turned)[0].transpose(0, 1)
    return Real(own_tensors(layer, "esm-meta"), x, outputs, SIX_ROTATED, unit=SINGLE)


def longformer() -> Real:
    """Without global tokens, whose projections the layer has none of."""
    model = model_of("Longformer", **WIDTHS, vocab_size=VOCABULARY, attention_window=[8, 8])
    x, none = inputs(40), torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    outputs = in_two(
        within(model, "layer.1.attention"),
        x,
        attention_mask=none.double(),
        is_index_masked=none,
        is_index_global_attn=none,
        is_global_attn=False,
    )
    state = written(model, "longformer", layer=1)
    return Real(state, x, outputs, HEADS, mask=Mask.window(4, 4), unit=SINGLE)


def deberta(kind: str, name: str) -> Real:
    model = model_of(kind, **WIDTHS, vocab_size=VOCABULARY, relative_attention=False)
    x = inputs(40)
    outputs = in_two(within(model, "layer.1.attention"), x, attention_mask=EVERYWHERE)
    # The root of head_dim is taken in float32.
    options = HEADS | {"scale": None}
    return Real(written(model, name, layer=1), x, outputs, options, unit=SINGLE)


def modernbert() -> Real:
    tokens = dict.fromkeys((f"{kind}_token_id" for kind in ("pad", "bos", "eos", "cls", "sep")), 0)
    model = model_of("ModernBert", **ROTATED, **tokens, vocab_size=VOCABULARY, attention_bias=True)
    x = inputs(60)
    turns = model.rotary_emb(x, torch.arange(LENGTH)[None], "full_attention")
    outputs = within(model, "layers.0.attn")(x, position_embeddings=turns)[0]
    theta = model.config.rope_parameters["full_attention"]["rope_theta"]
    options = SIX_ROTATED | {"rotary": Rotary(theta=theta)}
    return Real(written(model, "modernbert", layer=0), x, outputs.detach(), options, unit=SINGLE)


def xlnet() -> Real:
    """The terms of its scores that the layer has none of are set to 0."""
    model = model_of("XLNet", d_model=40, n_head=8, n_layer=2, d_inner=56, vocab_size=VOCABULARY)
    attention, x = within(model, "layer.1.rel_attn"), inputs(40)
    with torch.no_grad():
        for matrix in (attention.q, attention.k, attention.v, attention.o):
            matrix.mul_((5 / 40) ** 0.5)  # `sharpen` takes the last axis for the one summed over
        for relative in (attention.r, attention.r_w_bias, attention.r_r_bias):
            relative.zero_()
    state = written(model, "xlnet", layer=1)
    attention.layer_norm = nn.Identity()
    turned, places = x.transpose(0, 1), inputs(40, seed=2).transpose(0, 1).repeat(2, 1, 1)
    outputs, _ = attention(turned, None, None, None, places, None)
    return Real(state, x, (outputs - turned).transpose(0, 1).detach(), HEADS)


def conformer() -> Real:
    model = model_of("Wav2Vec2Conformer", **SPEECH, position_embeddings_type=None)
    x = inputs(40)
    outputs = within(model, "layers.1.self_attn")(x)[0]
    return Real(written(model, "conformer", layer=1), x, outputs.detach(), HEADS)


def wav2vec2() -> Real:
    model = model_of("Wav2Vec2", **SPEECH)
    x = inputs(40)
    outputs = within(model, "layers.1.attention")(x)[0]
    return Real(written(model, "wav2vec2", layer=1), x, outputs.detach(), HEADS)


CASES = {
    "bert": bert,
    "distilbert": distilbert,
    "mpnet": mpnet,
    "esm": esm,
    "esm-meta": esm_meta,
    "longformer": longformer,
    "deberta": lambda: deberta("Deberta", "deberta"),
    "deberta-v2": lambda: deberta("DebertaV2", "deberta-v2"),
    "modernbert": modernbert,
    "xlnet": xlnet,
    "conformer": conformer,
    "wav2vec2": wav2vec2,
}
# What these say of their function, and the module is not given; in the check it is 0.
OPEN = {"xlnet": ("score_bias",), "mpnet": ("score_bias",), "longformer": ("window",)}


@pytest.mark.parametrize("name", CASES)
def test_same_function(name: str) -> None:
    assert_same_function(left_open(name, *OPEN.get(name, ())), CASES[name]())


@pytest.mark.parametrize("kind", ["Roberta", "Electra"])
def test_those_that_share_berts_names(kind: str) -> None:
    assert_same_function("bert", bert_of(kind))


def test_a_whole_bert_becomes_the_file_of_tensorflow_and_comes_back() -> None:
    stored = file_of(model_of("Bert", **WIDTHS, vocab_size=VOCABULARY))
    made = convert(stored, "bert", "bert-tensorflow", heads=8)
    layer = "encoder/layer_1"
    norm = {f"{layer}/output/LayerNorm/{end}" for end in ("gamma", "beta")}
    assert norm | {"embeddings/word_embeddings", "pooler/dense/kernel"} <= made.keys()
    assert not any("." in name for name in made)
    up, theirs = "intermediate/dense/kernel", "intermediate.dense.weight"
    assert torch.equal(made[f"{layer}/{up}"], stored[f"encoder.layer.1.{theirs}"].mT)
    back = convert(
        {f"bert/{name}": x for name, x in made.items()}, "bert-tensorflow", "bert", heads=8
    )
    assert back.keys() == {f"bert/{name}" for name in stored}
    assert all(torch.equal(back[f"bert/{name}"], x) for name, x in stored.items())
