"""Relative positions in scores: DeBERTa's terms load with a proof, others are refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headwise import Attention, Mask, detect
from headwise.checkpoints import load_attention
from headwise.errors import OptionError
from headwise.function.spec import DisentangledRule
from headwise.layers import DebertaBias
from headwise.surgery import LayerCut, cut_layer
from tests.checkpoints.test_proof import spread
from tests.quick import others_extra
from tests.refusals import refusals

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 40,
    "intermediate_size": 26,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "max_position_embeddings": 64,
}
BOTH = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
V1, V2 = transformers.DebertaConfig, transformers.DebertaV2Config
V3 = {"share_att_key": True, "norm_rel_ebd": "layer_norm", "position_buckets": 8}
# name -> the config, its fields, the rule that is read, and the factor of head_dim in the scale
FORMS: dict[str, tuple[Any, dict[str, Any], DisentangledRule | None, int]] = {
    "v3": (V2, BOTH | V3, DisentangledRule(8, 64, is_shared=True, eps=1e-7), 3),
    "v1": (V1, BOTH, DisentangledRule(64), 3),
    "v1, p2c": (
        V1,
        {"relative_attention": True, "pos_att_type": ["p2c"], "max_relative_positions": 20},
        DisentangledRule(20, terms=("p2c",)),
        2,
    ),
    "v2, c2p": (
        V2,
        {"relative_attention": True, "pos_att_type": "c2p", "position_buckets": 6},
        DisentangledRule(6, 64, terms=("c2p",)),
        2,
    ),
    "v2, each position": (V2, BOTH, DisentangledRule(64), 3),
    "no terms, and their scale": (V1, {"pos_att_type": ["c2p"]}, None, 2),
}


def store(name: str, path: Path, **more: Any) -> Any:
    kind, fields, *_ = FORMS[name]
    model = transformers.AutoModel.from_config(kind(**SIZES, **fields, **more))
    spread(model).save_pretrained(path)
    return model


@pytest.mark.parametrize("name", others_extra(FORMS, "v1", quick=["v3"]))
def test_deberta_is_read_and_proved(name: str, tmp_path: Path) -> None:
    store(name, tmp_path)
    _, _, rule, factor = FORMS[name]
    layer = load_attention(tmp_path, layer=1)
    assert layer.proof.startswith("proved against"), layer.proof
    assert layer.spec.places == rule
    assert layer.spec.factor == pytest.approx((factor * 8) ** -0.5)
    with pytest.raises(OptionError, match=r"differ from \w+Attention on"):
        load_attention(tmp_path, layer=1, scale=8**-0.5)


@pytest.mark.slow
def test_sew_d_is_one_of_them(tmp_path: Path) -> None:
    config = transformers.SEWDConfig(
        hidden_size=48, num_attention_heads=6, num_hidden_layers=2, intermediate_size=26
    )
    spread(transformers.AutoModel.from_config(config)).save_pretrained(tmp_path)
    layer = load_attention(tmp_path, layer=1)
    assert layer.proof.startswith("proved against"), layer.proof
    assert layer.spec.places == DisentangledRule(256, 512, is_shared=True, eps=1e-7)


def test_a_layer_with_padding_is_the_model_and_goes_back_to_its_names(tmp_path: Path) -> None:
    model = store("v3", tmp_path)
    layer = load_attention(tmp_path, layer=0)
    ids, lengths = torch.arange(36).reshape(2, 18), torch.tensor([18, 7])
    real = torch.arange(18) < lengths[:, None]
    with torch.no_grad():
        x = model.embeddings(ids, mask=real)
        table = model.encoder.get_rel_embedding()
        pairs = (real[:, :, None] & real[:, None])[:, None]
        theirs = model.encoder.layer[0].attention.self(x, pairs, rel_embeddings=table)[0]
        mine = layer.head_outputs(x, mask=Mask.lengths(queries=lengths, keys=lengths))
    torch.testing.assert_close(mine.transpose(1, 2).flatten(2)[real], theirs[real])
    state, stored = layer.to_layout("deberta-v2"), model.state_dict()
    assert torch.equal(
        state["encoder.rel_embeddings.weight"], stored["encoder.rel_embeddings.weight"]
    )
    assert "encoder.LayerNorm.bias" in state
    options = {"score_bias": DebertaBias(**vars(layer.spec.places)), "scale": layer.scale}
    again = Attention.from_layout(state, layout="deberta-v2", num_heads=5, **options)
    assert torch.equal(again(x), layer(x))


@pytest.mark.parametrize("name", ["v3", "v2, each position"])
def test_heads_change_places_with_their_places(name: str, tmp_path: Path) -> None:
    store(name, tmp_path)
    layer = load_attention(tmp_path, layer=1, dtype=torch.float64)
    order, x = [3, 0, 4, 1, 2], torch.randn(2, 11, 40, dtype=torch.float64)
    key = torch.linalg.qr(torch.randn(5, 8, 8, dtype=torch.float64))[0] * 2
    cuts = {"kept": LayerCut(5, 5).keep(order), "turned": LayerCut(5, 5).turn(key=key)}
    with torch.no_grad():
        for cut in cuts.values():
            torch.testing.assert_close(cut_layer(cut, layer)(x), layer(x))
        heads = cut_layer(cuts["kept"], layer).head_outputs(x)
        torch.testing.assert_close(heads, layer.head_outputs(x)[:, order])


def folder(config: Any, path: Path) -> Path:
    spread(transformers.AutoModel.from_config(config)).save_pretrained(path)
    return path


def load(config: Any) -> Any:
    def call() -> None:
        from tempfile import TemporaryDirectory

        with TemporaryDirectory() as path:
            load_attention(folder(config(), Path(path)))

    return call


SWIN = {"embed_dim": 16, "depths": [2], "num_heads": [2], "image_size": 32, "window_size": 4}
CONFORMER: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 40,
    "intermediate_size": 26,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
}
REFUSED = {
    "Transformer-XL": (
        load(
            lambda: transformers.XLNetConfig(
                vocab_size=61, d_model=40, n_layer=2, n_head=5, d_inner=26
            )
        ),
        OptionError,
        ["Transformer-XL's relative positions", "r_r_bias", "AttentionMatrix"],
    ),
    "Shaw": (
        load(lambda: transformers.Wav2Vec2BertConfig(**CONFORMER)),
        OptionError,
        ["Shaw's relative positions", "distance_embedding", "AttentionMatrix"],
    ),
    "Swin": (
        load(lambda: transformers.SwinConfig(**SWIN)),
        OptionError,
        ["a table by place in the window", "AttentionMatrix"],
    ),
    "SAM": (
        load(
            lambda: transformers.SamVisionConfig(
                hidden_size=40,
                num_attention_heads=5,
                num_hidden_layers=2,
                image_size=32,
                patch_size=8,
                mlp_dim=26,
                output_channels=10,
            )
        ),
        OptionError,
        ["rows and columns of the unscaled query", "rel_pos_h", "AttentionMatrix"],
    ),
    "talking heads": (
        load(lambda: V1(**SIZES, **BOTH, talking_head=True)),
        OptionError,
        ["head_logits_proj", "the model's own class"],
    ),
}
test_what_no_layer_has_is_refused_by_name = refusals(REFUSED)


def test_detect_says_what_scores_have(tmp_path: Path) -> None:
    found = detect(folder(transformers.SwinConfig(**SWIN), tmp_path))
    assert "its scores have a table by place in the window" in str(found)
    function = found.fitting[0][0].layout.function
    assert function.words()["score_bias"] == "a table by place in the window"
    xlnet = detect({f"rel_attn.{n}": torch.zeros(40, 5, 8) for n in ("q", "k", "v", "o", "r")})
    assert "score_bias" in xlnet.require_only_layout().function.conflicts(function)
