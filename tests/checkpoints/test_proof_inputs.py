"""What a class needs to run in a proof: images, sounds, sources, boxes, late positions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headwise import Attention
from headwise.checkpoints import load_attention, readings
from headwise.checkpoints.inputs import find_field, list_inputs, list_runs
from headwise.checkpoints.skeleton import _tokens_in_rows
from headwise.errors import OptionError
from tests.quick import others_extra
from tools.huggingface_classes import classes
from tools.huggingface_classes.trial import Row, built

# model_type -> an attention of it, and its class.
PLACES = {
    "siglip2_vision_model": ("head.attention.", "MultiheadAttention"),
    "fsmt": ("decoder.layers.0.encoder_attn.", "Attention"),  # its batch is the second axis
    "hunyuan_v1_dense": ("layers.0.self_attn.", "HunYuanDenseV1Attention"),
    "rf_detr_dinov2": ("encoder.layer.0.attention.", "RfDetrDinov2Attention"),  # 2 in a window
    "vitdet": ("encoder.layer.0.attention.", "VitDetAttention"),  # projects a map of tokens
    "vivit": ("encoder.layer.1.attention.", "VivitAttention"),
    "vilt": ("encoder.layer.0.attention.", "ViltAttention"),
    "whisper": ("decoder.layers.1.encoder_attn.", "WhisperAttention"),
    "lxmert": ("encoder.r_layers.0.attention.", "LxmertSelfAttentionLayer"),
    "trocr": ("model.decoder.layers.0.encoder_attn.", "TrOCRAttention"),
    "recurrent_gemma": ("layers.1.temporal_block.", "RecurrentGemmaAttention"),
    "idefics2": ("connector.perceiver_resampler.layers.0.self_attn.", "Idefics2PerceiverAttention"),
    "mpt": ("blocks.0.attn.", "MptAttention"),  # its config has a part for the attention
    "mimi": ("decoder_transformer.layers.0.self_attn.", "MimiAttention"),  # reads a book of codes
}


@pytest.mark.parametrize(
    "model_type",
    others_extra(
        PLACES,
        "fsmt",
        "lxmert",
        quick=["siglip2_vision_model", "rf_detr_dinov2", "hunyuan_v1_dense", "mpt"],
    ),
)
def test_an_attention_behind_any_input_is_proved(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = classes.model_class(model_type)
    assert kind is not None
    model = built(kind, Row(model_type, None))
    assert model is not None
    model.save_pretrained(tmp_path)
    prefix, name = PLACES[model_type]
    layer = load_attention(tmp_path, prefix=prefix)
    assert layer.proof.startswith(f"proved against {name}, ")

    def move(*args: Any, **options: Any) -> Attention:
        moved = make(*args, **options)
        moved.k_proj.weight.data.mul_(1.001)
        return moved

    make = readings.attention_from_state
    monkeypatch.setattr(readings, "attention_from_state", move)
    with pytest.raises(OptionError):
        load_attention(tmp_path, prefix=prefix)


def test_tokens_in_rows() -> None:
    x, ids = torch.arange(2 * 3 * 5.0 * 4).reshape(2, 3, 5, 4), torch.ones(2, 5)
    assert torch.equal(_tokens_in_rows(x, [ids]), x.reshape(2, 15, 4))
    assert torch.equal(_tokens_in_rows(x[0, 0], [ids]), x[0, :1])
    assert torch.equal(_tokens_in_rows(x[:, 0], [ids]), x[:, 0])
    assert torch.equal(_tokens_in_rows(x[:, 0].transpose(0, 1), [ids]), x[:, 0])
    assert torch.equal(_tokens_in_rows(x[0].transpose(0, 1), [ids]), x[0].transpose(0, 1))


def test_a_field_of_a_part() -> None:
    assert find_field({"a": None, "b": {"a": 3}}, "a") == 3
    assert find_field({"a": 1, "b": {"a": 3}}, "c", "a") == 1
    assert find_field({"b": {}}, "a") is None


class _Owner(nn.Module):
    class config:  # noqa: N801  as models of transformers have it
        @staticmethod
        def to_dict() -> dict[str, Any]:
            return {"hidden_size": 6, "image_size": 8, "vocab_size": 20}

    def forward(self, input_ids: Any = None, pixel_values: Any = None) -> None: ...

    def get_image_features(self, pixel_values: Any) -> None: ...


def test_texts_come_before_images_and_both_at_last() -> None:
    owner = _Owner()
    names = [
        (is_mixed, name, sorted(given))
        for run, is_mixed in list_runs([owner])
        for group in list_inputs(run, is_large=False, is_mixed=is_mixed)
        for name, given, _ in group
    ]
    assert names == [
        (False, "a short text", ["input_ids"]),
        (False, "a long text", ["input_ids"]),
        (False, "an image", ["pixel_values"]),
        (False, "a video", ["pixel_values"]),
        (True, "an image", ["input_ids", "pixel_values"]),
        (True, "a video", ["input_ids", "pixel_values"]),
    ]
