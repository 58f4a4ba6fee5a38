"""Layouts of towers and encoders: the real classes, by the proof of a load."""

from pathlib import Path

import pytest
import torch

from headwise.checkpoints import load_attention
from headwise.function.rotary import Rotary
from headwise.function.spec import NormRule, ValueRule
from headwise.layouts.registry import layout
from tests.quick import others_slow
from tools.huggingface_classes import classes
from tools.huggingface_classes.trial import Row, built

# layout -> model_type, the start of a module's names, its rotation
CASES: dict[str, tuple[str, str, Rotary]] = {
    "qwen-omni-vision": (
        "qwen2_5_omni_vision_encoder",
        "blocks.1.attn.",
        Rotary.of_plane(10_000.0, 16),
    ),
    "gemma4-vision": (
        "gemma4_vision",
        "encoder.layers.1.self_attn.",
        Rotary.of_plane(100.0, 16, order="parts"),
    ),
    "nemotron-audio": (
        "nemotron3_5_transcribe_asr_audio",
        "layers.1.self_attn.",
        Rotary(10_000.0, 8),
    ),
    "cosmos3": (
        "cosmos3_omni",
        "language_model.layers.1.self_attn.",
        Rotary(5e5, 16, axes=(0, 1, 2, 0, 1, 2, 0, 1)),
    ),
}


@pytest.mark.parametrize("name", others_slow(CASES))
def test_the_real_class_is_the_layer(name: str, tmp_path: Path) -> None:
    model_type, prefix, rotary = CASES[name]
    kind = classes.model_class(model_type)
    assert kind is not None
    model = built(kind, Row(model_type, None))
    assert model is not None
    model.save_pretrained(tmp_path)
    layer = load_attention(tmp_path, prefix=prefix)
    assert layer.proof.startswith("proved against"), layer.proof
    assert layer.rotary == rotary
    function = layer.spec
    assert isinstance(function.values, ValueRule) is (name == "gemma4-vision")
    assert isinstance(function.qk_norm, NormRule) is (name != "qwen-omni-vision")
    written = layer.to_layout(layout(name), accept=["rotary", "rotary_width"])
    stored = dict(model.state_dict())
    assert {*written} <= {*layout(name).tensors}
    for tensor in written.values():
        assert any(torch.equal(tensor, x) for x in stored.values() if x.shape == tensor.shape)
