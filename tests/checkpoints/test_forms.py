"""Forms of attention that configs state: each loads with a proof, and a wrong number is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe import Ernie4_5_VLMoeTextModel

from headwise import Rotary
from headwise.checkpoints import load_attention
from headwise.errors import OptionError
from headwise.function import (
    DynamicScaling,
    LongScaling,
    ProportionalScaling,
    axes_of_sections,
)
from tests.checkpoints.test_proof import SIZES, spread
from tests.quick import others_slow

PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 12}
HEAD = SIZES | {"head_dim": 16}
LONG = {
    "short_factor": [1.0, 1.1, 1.3, 1.2, 1.5],
    "long_factor": [2.0, 3.0, 4.0, 6.0, 7.0],
    "original_max_position_embeddings": 32,
}


def sections(sizes: list[int], **others: Any) -> dict[str, Any]:
    return {"rope_parameters": PLAIN | {"mrope_section": sizes}, **others}


# name -> the config, the options that its layers have, and wrong ones.
FORMS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "blocks": (
        lambda: transformers.Qwen2VLTextConfig(
            **{k: n for k, n in SIZES.items() if k != "head_dim"}, **sections([1, 1, 1])
        ),
        {"rotary": Rotary(10_000.0, 6, axes=(0, 1, 2))},
        {"rotary": Rotary(10_000.0, 6)},
    ),
    "in turn": (
        lambda: transformers.Qwen3VLTextConfig(**HEAD, **sections([4, 2, 2])),
        {"rotary": Rotary(10_000.0, 16, axes=axes_of_sections((4, 2, 2), order="in turn"))},
        {"rotary": Rotary(10_000.0, 16, axes=axes_of_sections((4, 2, 2)))},
    ),
    "rows first": (
        lambda: Ernie4_5_VLMoeTextModel(
            transformers.Ernie4_5_VLMoeTextConfig(
                **{k: n for k, n in HEAD.items() if k != "head_dim"} | {"hidden_size": 96},
                **sections([3, 3, 2]),
            )
        ),
        {
            "rotary": Rotary(
                10_000.0, 16, "interleaved", axes=axes_of_sections((3, 3, 2), order="rows first")
            )
        },
        {"rotary": Rotary(10_000.0, 16, "interleaved", axes=axes_of_sections((3, 3, 2)))},
    ),
    "long": (
        lambda: transformers.Phi3Config(
            **{k: n for k, n in SIZES.items() if k != "head_dim"} | {"hidden_size": 60},
            pad_token_id=0,
            max_position_embeddings=128,
            original_max_position_embeddings=32,
            rope_parameters={"rope_type": "longrope", "rope_theta": 10_000.0, **LONG},
        ),
        {
            "rotary": Rotary(
                10_000.0,
                10,
                scaling=LongScaling(
                    tuple(LONG["short_factor"]), tuple(LONG["long_factor"]), 32, 4.0
                ),
            )
        },
        {
            "rotary": Rotary(
                10_000.0,
                10,
                scaling=LongScaling(
                    tuple(LONG["short_factor"]), tuple(LONG["long_factor"]), 33, 4.0
                ),
            )
        },
    ),
    "dynamic": (
        lambda: transformers.LlamaConfig(
            **SIZES,
            max_position_embeddings=40,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
        ),
        {"rotary": Rotary(10_000.0, 10, scaling=DynamicScaling(4.0, 40))},
        {"rotary": Rotary(10_000.0, 10, scaling=DynamicScaling(4.0, 32))},
    ),
    "proportional": (
        lambda: transformers.LlamaConfig(
            **HEAD,
            rope_parameters={
                "rope_type": "proportional",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.5,
            },
        ),
        {"rotary": Rotary(10_000.0, 16, scaling=ProportionalScaling(0.5))},
        {"rotary": Rotary(10_000.0, 8)},
    ),
}


@pytest.fixture(params=others_slow(FORMS, "rows first", "dynamic"))
def form(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    config, options, wrong = FORMS[request.param]
    made = config()
    model = made if isinstance(made, nn.Module) else transformers.AutoModel.from_config(made)
    spread(model)
    model.save_pretrained(tmp_path)
    return tmp_path, model, options, wrong


def test_a_form_is_read_and_proved(form: Any) -> None:
    path, _, options, wrong = form
    layer = load_attention(path, layer=1)
    assert layer.proof.startswith("proved against"), layer.proof
    assert {name: getattr(layer, name) for name in options} == options
    with pytest.raises(
        OptionError, match=r"differ from \w+Attention on|differently: |positions of"
    ):
        load_attention(path, layer=1, **wrong)


PICTURE: dict[str, Any] = {
    "hidden_size": 48,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "intermediate_size": 26,
    "image_size": 40,
    "patch_size": 8,
}
PICTURES: dict[str, tuple[Any, Rotary]] = {
    "dinov3": (
        lambda: transformers.DINOv3ViTConfig(**PICTURE),
        Rotary.of_plane(100.0, 16),
    ),
    "pixtral": (
        lambda: transformers.PixtralVisionConfig(**PICTURE),
        Rotary.of_plane(10_000.0, 16, order="alternating"),
    ),
}


@pytest.mark.parametrize("name", others_slow(PICTURES, "pixtral"))
def test_a_vision_tower_turns_by_row_and_column(name: str, tmp_path: Path) -> None:
    config, rotary = PICTURES[name]
    spread(transformers.AutoModel.from_config(config())).save_pretrained(tmp_path)
    layer = load_attention(tmp_path, layer=1)
    assert layer.proof.startswith("proved against"), layer.proof
    assert layer.rotary == rotary
    with pytest.raises(OptionError, match="no positions for a layer that rotates by row"):
        layer(torch.zeros(2, 9, 48))
    for wrong in ("parts", "alternating" if name == "dinov3" else "halves"):
        other = Rotary.of_plane(rotary.theta, 16, order=wrong)
        with pytest.raises(OptionError, match=r"differ from \w+Attention on|differently: rotary"):
            load_attention(tmp_path, layer=1, rotary=other)
