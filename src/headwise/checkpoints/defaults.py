"""Fields that the classes of transformers set by themselves where a config.json leaves them out.

Listed are the defaults of `transformers.models.*.configuration_*` that change attention and differ
from what `headwise.checkpoints.config` takes for a missing field; `tools/config_fields.py` checks.
"""

from typing import Any

_THETAS: dict[Any, str] = {
    25_000.0: "fuyu",
    100_000.0: "helium",
    500_000.0: "cohere ernie4_5 ernie4_5_moe olmo3 qwen3_vl_text",
    1_000_000.0: "gemma3_text lfm2 mixtral phimoe qwen2_5_vl_text qwen2_vl_text",
    2_000_000.0: "smollm3",
}
_ROTATED_SHARES: dict[Any, str] = {
    0.25: "gpt_neox qwen3_next stablelm",
    0.5: "glm glm4 nemotron persimmon phi",
}
_WINDOWS: dict[Any, str] = {4096: "cohere2 gemma2 gemma3_text mistral olmo3"}
_FACTORS: dict[str, dict[Any, str]] = {
    "attention_multiplier": {1.0: "granite granitemoe granitemoeshared"},
    "query_pre_attn_scalar": {256: "gemma2 gemma3_text"},
    "attn_logit_softcapping": {50.0: "gemma2"},
    "rms_norm_eps": {1e-5: "chameleon hunyuan_v1_dense olmo2 olmo3"},
    "layer_norm_eps": {1e-5: "cohere persimmon phi stablelm"},
    "norm_eps": {1e-5: "lfm2"},
    "window_size": {256: "gpt_neo"},
    "head_dim": {128: "glm glm4"},
    "position_embedding_type": {"absolute": "esm"},
    "no_rope_layer_interval": {4: "smollm3"},
    "rotary_emb_base": {10_000.0: "gpt_neox"},
    "global_rope_theta": {160_000.0: "modernbert"},
}
_FIELDS: dict[str, dict[Any, str]] = {
    "rope_theta": _THETAS,
    "partial_rotary_factor": _ROTATED_SHARES,
    "sliding_window": _WINDOWS,
    **_FACTORS,
}
DEFAULTS: dict[str, dict[str, Any]] = {}
for _name, _values in _FIELDS.items():
    for _value, _kinds in _values.items():
        for _kind in _kinds.split():
            DEFAULTS.setdefault(_kind, {})[_name] = _value
# Their rotation is scaled, by many numbers, unless the config states another.
SCALED = ("apertus", "cwm", "gpt_oss")
# Layers with a window turn by a theta of their own, unscaled: its field in older files, and itself.
LOCAL_THETAS = {
    "gemma3_text": ("rope_local_base_freq", 10_000.0),
    "modernbert": ("local_rope_theta", 10_000.0),
    "olmo3": ("", 500_000.0),
}
