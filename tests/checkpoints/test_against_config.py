"""A config that says another function than a layout of its names."""

from typing import Any

import pytest

from headwise.checkpoints.config import find_config_contradiction
from headwise.layouts.registry import layout

SIZES = {"heads": 12, "head_dim": 10}


@pytest.mark.parametrize(
    ("name", "said", "why"),
    [
        ("llama", {}, None),
        ("llama", {"clip_qkv": None, "attn_logit_softcapping": None, "alibi": False}, None),
        ("llama", {"clip_qkv": 8.0}, "clip: none: clip_qkv 8.0"),
        ("dbrx", {"attn_config": {"clip_qkv": 8.0}}, None),
        (
            "gpt-bigcode-mqa",
            {"attn_config": {"clip_qkv": 8}},
            "clip: none: clip_qkv 8",
        ),
        (
            "llama",
            {"attention_multiplier": 0.25},
            "scale: 1/sqrt(head_dim): attention_multiplier 0.25",
        ),
        ("llama", {"attention_multiplier": 10**-0.5}, None),
        ("granite", {"attention_multiplier": 0.25}, None),
        ("llama", {"query_pre_attn_scalar": 10}, None),
        (
            "llama",
            {"query_pre_attn_scalar": 12},
            "scale: 1/sqrt(head_dim): query_pre_attn_scalar 12",
        ),
        ("gpt2", {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}, None),
        (
            "gpt2",
            {"scale_attn_weights": False},
            "scale: 1/sqrt(head_dim): scale_attn_weights False",
        ),
        (
            "gpt2",
            {"scale_attn_by_inverse_layer_idx": True},
            "scale: 1/sqrt(head_dim): scale_attn_by_inverse_layer_idx True",
        ),
        (
            "llama",
            {"attn_logit_softcapping": 50.0},
            "softcap: none: attn_logit_softcapping 50.0",
        ),
        (
            "gemma2",
            {"attn_logit_softcapping": None},
            "softcap: tanh: attn_logit_softcapping None",
        ),
        ("gemma2", {"attn_logit_softcapping": 50.0}, None),
        ("falcon-7b", {"alibi": True}, "score_bias: none: alibi True"),
        (
            "falcon-rw",
            {"alibi": False},
            "score_bias: alibi before the scale: alibi False",
        ),
        ("falcon-rw", {"alibi": True}, None),
        ("bert", {"position_embedding_type": "absolute"}, None),
        (
            "bert",
            {"position_embedding_type": "alibi"},
            "score_bias: none: position_embedding_type alibi",
        ),
        (
            "bert",
            {"position_embedding_type": "relative_key_query"},
            "score_bias: none: position_embedding_type relative_key_query",
        ),
        (
            "bert",
            {"position_embedding_type": "rotary"},
            "rotary: none: position_embedding_type rotary",
        ),
        ("esm", {"position_embedding_type": "rotary"}, None),
        ("esm", {"position_embedding_type": "absolute"}, None),
        (
            "llama",
            {"position_embedding_type": "absolute"},
            "rotary: half-split: position_embedding_type absolute",
        ),
        ("llama", {"no_rope_layers": [1, 0]}, None),
        (
            "llama",
            {"no_rope_layers": [0, 0]},
            "rotary: half-split: no_rope_layers [0, 0]",
        ),
    ],
)
def test_objections(name: str, said: dict[str, Any], why: str | None) -> None:
    for config in (said, {"text_config": said}):
        found = find_config_contradiction(config, layout(name).function, SIZES)
        assert found == (why and "; the config says ".join(why.rsplit(": ", 1)))


@pytest.mark.parametrize(
    ("name", "objects"), [("llama", True), ("nemotron", False), ("gpt2", False)]
)
def test_a_part_of_the_head(name: str, objects: bool) -> None:
    found = find_config_contradiction({}, layout(name).function, {**SIZES, "rotary_width": 4})
    assert found == ("rotary_width: head_dim; the argument says 4 of 10" if objects else None)
    assert (
        find_config_contradiction({}, layout(name).function, {**SIZES, "rotary_width": 10}) is None
    )
