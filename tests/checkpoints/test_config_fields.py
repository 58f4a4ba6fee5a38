"""No field of a config changes the attention of a class without being read, or refused by name."""

from typing import Any

import pytest

from headwise.checkpoints import config
from headwise.errors import OptionError
from headwise.layouts.registry import layout
from tests.quick import others_extra
from tools.config_fields import tried

# model_type -> changes that are read, and changes that are refused by name
READ: dict[str, tuple[str, ...]] = {
    "mpnet": ("as it is", "relative_attention_num_buckets left out"),
    "umt5": ("as it is", "is_decoder=true"),
    "phi": ("qk_layernorm=true", "rope_parameters left out"),
    "gemma3_text": ("use_bidirectional_attention=true", "rope_theta of v4", "rope_scaling of v4"),
    "gpt_neox": ("rope_parameters left out",),
    "mpt": ("attn_config.clip_qkv=0.3",),
    "deberta-v2": ('pos_att_type=["c2p", "p2c"]', "relative_attention=true"),
}
REFUSED: dict[str, tuple[str, ...]] = {
    "cohere": ("use_qk_norm=true",),
    "stablelm": ("qk_layernorm=true",),
    "mpt": ("attn_config.softmax_scale=0.5",),
    "mvp": ("use_prompt=true",),
}


def _row_of(kind: str, labels: tuple[str, ...]) -> Any:
    return tried(kind, *(label.partition("=")[0].partition(" ")[0] for label in labels))


@pytest.mark.parametrize("kind", READ)
def test_a_setting_that_is_read(kind: str) -> None:
    row = _row_of(kind, READ[kind])
    assert not row.lost
    assert {*READ[kind]} <= {*row.equal}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_setting_that_is_refused_by_name(kind: str) -> None:
    row = _row_of(kind, REFUSED[kind])
    assert not row.lost
    for label in REFUSED[kind]:
        assert label.partition("=")[0].rpartition(".")[2].partition("_")[0] in row.refused[label]


def test_a_rotation_by_rows_and_columns_is_refused() -> None:
    fields = {"model_type": "llama4_vision_model", "patch_size": 14, "rope_theta": 1e4}
    with pytest.raises(OptionError, match="and patch_size 14"):
        config.resolve(layout("llama").function, fields, layer=0)


@pytest.mark.parametrize(
    ("module", "name", "value", "kind", "field"),
    [
        (config, "_FORMS", {}, "mvp", "use_prompt"),
        (config, "read_place_terms", lambda _: (), "deberta-v2", "pos_att_type"),
        (config, "_TWO_SIDED", (), "gemma3_text", "use_bidirectional_attention"),
        (config, "LOCAL_THETAS", {}, "gemma3_text", "rope_theta"),
        (config, "DEFAULTS", {}, "granite", "attention_multiplier"),
    ],
)
def test_a_reader_that_is_lost_is_found_out(
    module: Any, name: str, value: Any, kind: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, value)
    assert any(label.startswith(field) for label in tried(kind, field).lost)


def test_defaults_are_of_types_that_load() -> None:
    assert {*config.DEFAULTS, *config.LOCAL_THETAS} <= config._KNOWN


KINDS = (
    "bart bert beit codegen cohere cohere2 deberta-v2 distilbert ernie4_5 esm falcon "
    "gemma2 gemma3_text glm gpt2 gpt_neo gpt_neox gpt_oss granite hunyuan_v1_dense "
    "idefics2 lfm2 llama mistral modernbert mpnet mpt mt5 mvp nemotron olmo olmo3 phi "
    "phi3 qwen2_moe qwen2_vl qwen3_next smollm3 stablelm starcoder2 t5 umt5 vit wav2vec2 "
    "whisper"
)
IN_CHECK = "bart gemma2 gpt2 llama t5"


@pytest.mark.parametrize("kind", others_extra(KINDS.split(), *IN_CHECK.split()))
def test_no_change_of_any_field_is_lost(kind: str) -> None:
    row = tried(kind)
    assert not row.lost
    assert row.equal or row.refused or row.reason
