"""What a config.json says: counts, layouts, and which layers rotate how."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from headwise.checkpoints import config as configs
from headwise.checkpoints.config import (
    layer_attends,
    layer_rotates,
    layout_name,
    read_config,
    read_stated_counts,
    resolve,
    rotary_section_of_layer,
)
from headwise.checkpoints.fields import ConfigFields
from headwise.errors import OptionError
from headwise.layouts.registry import layout, layouts_by_name

FALCONS = [
    ({"new_decoder_architecture": True, "num_kv_heads": 8, "multi_query": True}, "falcon-40b"),
    ({"new_decoder_architecture": False, "multi_query": True}, "falcon-7b"),
    ({"new_decoder_architecture": False, "multi_query": False}, "falcon-rw"),
]
BIGCODES = [({}, "gpt-bigcode-mqa"), ({"multi_query": False}, "gpt-bigcode-mha")]


def test_every_layout_that_a_config_names_is_there() -> None:
    assert set(configs._LAYOUTS.values()) <= layouts_by_name().keys()


@pytest.mark.parametrize("kind", configs._LAYOUTS)
def test_every_model_type_is_one_of_transformers(kind: str) -> None:
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    assert kind in known or kind in ("internlm2", "kimi_k2")  # which bring their own code


@pytest.mark.parametrize(("said", "name"), FALCONS)
def test_falcons_differ_by_two_switches(said: dict[str, Any], name: str) -> None:
    assert layout_name({"model_type": "falcon", **said}) == name
    assert name in layouts_by_name()


@pytest.mark.parametrize(("said", "name"), BIGCODES)
def test_big_codes_differ_by_one(said: dict[str, Any], name: str) -> None:
    assert layout_name({"model_type": "gpt_bigcode", **said}) == name
    assert name in layouts_by_name()


def test_a_model_of_text_and_pictures_is_in_the_layout_of_its_text() -> None:
    assert layout_name({"model_type": "llava", "text_config": {"model_type": "mistral"}}) == "llama"
    assert layout_name({"model_type": "llava", "text_config": {"model_type": "own"}}) is None
    assert layout_name({"model_type": "clip", "text_config": {"model_type": "own"}}) == "clip"


@pytest.mark.parametrize(
    ("said", "counts"),
    [
        ({}, {}),
        ({"num_attention_heads": [3, 6]}, {}),  # one number for each stage
        ({"num_attention_heads": 12.0}, {"heads": 12}),
        ({"n_head": 12}, {"heads": 12}),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, {"heads": 12, "kv_heads": 3}),
        ({"n_head": 12, "multi_query": True}, {"heads": 12, "kv_heads": 1}),
        ({"n_heads": 12, "attn_config": {"kv_n_heads": 3}}, {"heads": 12, "kv_heads": 3}),
        ({"num_attention_heads": 12, "d_kv": 7}, {"heads": 12, "head_dim": 7}),
        ({"text_config": {"num_attention_heads": 12}}, {"heads": 12}),
        ({"n_head": 12, "rotary_dim": 6}, {"heads": 12, "rotary_width": 6}),
        (
            {"n_head": 12, "hidden_size": 120, "rotary_pct": 0.4},
            {"heads": 12, "rotary_width": 4},
        ),
        ({"head_dim": 12, "partial_rotary_factor": 0.25}, {"head_dim": 12, "rotary_width": 4}),
        (
            {"n_head": 12, "hidden_size": 96, "head_dim": 10, "partial_rotary_factor": 1.0},
            {"heads": 12, "head_dim": 10, "rotary_width": 10},
        ),
        (
            {"head_dim": 8, "rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}},
            {"head_dim": 8, "rotary_width": 4},
        ),
    ],
)
def test_counts(said: dict[str, Any], counts: dict[str, int]) -> None:
    assert read_stated_counts(said) == counts


def test_a_rotation_of_an_odd_share_of_the_head_turns_whole_pairs() -> None:
    said = {"head_dim": 12, "partial_rotary_factor": 0.25, "rope_theta": 1e4}
    rotation = resolve(layout("phi").function, said, layer=0).rotation
    assert rotation is not None
    assert rotation.width == 4
    # The frequencies of transformers are powers of theta by thirds, those of four by halves.
    assert (rotation.theta, rotation.exponent_width) == (1e4, 3)


def test_each_layer_rotates_as_its_kind_does() -> None:
    said = {
        "rope_parameters": {"full_attention": {"rope_theta": 9.0}, "sliding_attention": {"a": 1}},
        "layer_types": ["sliding_attention", "full_attention"],
    }
    assert rotary_section_of_layer(said, 0) == {"a": 1}
    assert rotary_section_of_layer(said, 1) == {"rope_theta": 9.0}
    assert rotary_section_of_layer(said, 2) == {"rope_theta": 9.0}  # beyond what the list reaches
    assert rotary_section_of_layer({"rope_scaling": {"type": "linear"}}, 5) == {"type": "linear"}
    assert rotary_section_of_layer({}, 0) == {}


@pytest.mark.parametrize(
    ("said", "layers"),
    [
        ({}, [None, None]),
        ({"rope_theta": 9.0}, [True, True]),
        ({"rope_theta": 9.0, "no_rope_layers": [1, 0]}, [True, False]),
        ({"rope_theta": 9.0, "no_rope_layers": [0]}, [False, None]),
        ({"model_type": "cohere2", "sliding_window": 8}, [None, None]),
        (
            {
                "model_type": "exaone4",
                "sliding_window": 8,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            [False, True],
        ),
        (
            {
                "model_type": "cohere2",
                "sliding_window": 8,
                "rope_theta": 9.0,
                "layer_types": ["full_attention"],
            },
            [False, None],
        ),
    ],
)
def test_some_models_rotate_in_some_layers(said: dict[str, Any], layers: list[bool | None]) -> None:
    assert [layer_rotates(said, layer) for layer in range(2)] == layers


def test_layers_of_a_hybrid_attend_by_their_kind() -> None:
    kinds = {
        "full_attention": True,
        "chunked_attention": True,
        "indexed_attention": True,
        "minimax_m3_sparse": True,
        "hybrid": True,
        "hybrid_sliding": True,
        "linear_attention": False,
        "hybrid_linear": False,
        "mamba": False,
        "conv": False,
    }
    said = {"layer_types": list(kinds)}
    assert [layer_attends(said, layer) for layer in range(len(kinds))] == list(kinds.values())
    assert layer_attends(said, len(kinds))  # beyond what the list reaches


def test_a_folder_without_a_config_says_nothing(tmp_path: Path) -> None:
    assert read_config(tmp_path) == {}


@pytest.mark.parametrize(
    ("text", "seen"), [("{", "no JSON"), ("[1]", "holds a list"), (b"\xff", "no JSON")]
)
def test_a_config_that_is_none_is_refused(tmp_path: Path, text: str | bytes, seen: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(OptionError, match=seen):
        read_config(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, pytest.param(10**400, id="large"), True, "3"]
)
def test_a_number_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(OptionError, match="rope_theta: a finite number"):
        ConfigFields({"rope_theta": value}, origin="config.json").number("rope_theta")


@pytest.mark.parametrize(
    ("mscale", "scale"), [(1.0, 0.135233779), (0.707, 0.114721387), (0.0, 0.072168784)]
)
def test_the_scale_of_a_latent_has_mscale_all_dim(mscale: float, scale: float) -> None:
    """Of DeepSeek V3 and V2, and without the factor; head_dim of a config is what turns alone."""
    scaling = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    config = {
        "model_type": "deepseek_v3",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "head_dim": 64,
        "rope_parameters": {**scaling, "rope_theta": 1e4, "mscale_all_dim": mscale},
    }
    assert read_stated_counts(config) == {"heads": 4, "head_dim": 192, "rotary_width": 64}
    spec = resolve(layout("deepseek").function, config, layer=0)
    assert replace(spec, head_dim=192).factor == pytest.approx(scale, abs=5e-10)
    assert spec.rotation is not None
    assert spec.rotation.width == 64
    assert layout_name(config) == "deepseek"
    assert layout_name({**config, "q_lora_rank": None}) == "deepseek-lite"
