"""Fields that the classes of transformers set by themselves where a config.json leaves them out.

Listed are the defaults of `transformers.models.*.configuration_*` that change attention and differ
from what `headwise.checkpoints.config` takes for a missing field; `tools/config_fields.py` checks.
"""

from typing import Any

_FIELDS: tuple[tuple[str, Any, str], ...] = (
    ("rope_theta", 25_000.0, "fuyu"),
    ("rope_theta", 100_000.0, "helium"),
    ("rope_theta", 500_000.0, "cohere ernie4_5 ernie4_5_moe olmo3 qwen3_vl_text"),
    ("rope_theta", 1e6, "gemma3_text lfm2 mixtral phimoe qwen2_5_vl_text qwen2_vl_text"),
    ("rope_theta", 2_000_000.0, "smollm3"),
    ("rotary_emb_base", 10_000.0, "gpt_neox"),
    ("global_rope_theta", 160_000.0, "modernbert"),
    ("partial_rotary_factor", 0.25, "gpt_neox qwen3_next stablelm"),
    ("partial_rotary_factor", 0.5, "glm glm4 nemotron persimmon phi"),
    ("no_rope_layer_interval", 4, "smollm3"),
    ("position_embedding_type", "absolute", "esm"),
    ("sliding_window", 4096, "cohere2 gemma2 gemma3_text mistral olmo3"),
    ("window_size", 256, "gpt_neo"),
    ("attention_multiplier", 1.0, "granite granitemoe granitemoeshared"),
    ("query_pre_attn_scalar", 256, "gemma2 gemma3_text"),
    ("attn_logit_softcapping", 50.0, "gemma2"),
    ("rms_norm_eps", 1e-5, "chameleon hunyuan_v1_dense olmo2 olmo3"),
    ("layer_norm_eps", 1e-5, "cohere persimmon phi stablelm"),
    ("norm_eps", 1e-5, "lfm2"),
    ("head_dim", 128, "glm glm4"),
)
DEFAULTS: dict[str, dict[str, Any]] = {}
for _name, _value, _kinds in _FIELDS:
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
