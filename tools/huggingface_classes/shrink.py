"""A configuration made small: sizes by the names of their fields, layers by their kinds.

Whatever is a width becomes WIDTH, so that what has to agree between towers agrees. Per-layer lists
keep one layer of each kind. What this does not fit is in overrides.json: model type -> field ->
value, wherever a configuration of that type stands, also as a part of another.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCABULARY = 64, 4, 2, 16, 2, 160
OVERRIDES = json.loads(Path(__file__).with_name("overrides.json").read_text("utf-8"))
SPECIAL = 10  # the first of the special tokens' ids

# field -> value, the first pattern that matches the whole name
Sizes = tuple[tuple[str, int], ...]
COUNTS: Sizes = (
    (r"(.*_)?vocab_size(_per_layer_input)?", VOCABULARY),
    (r"pad_token_id", 0),
    (r"(decoder_start|bos)_token_id", 1),
    (r"eos_token_id", 2),
    (r"(num|n)_(local_|routed_)?experts|moe_num_experts|num_moe_experts", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts|moe_top_k|num_selected_experts", 4),
    (r"num_queries", 5),
    (r"n_group|topk_group|num_expert_group", 1),
    (r"(num_|n_)?((?!sr_|se_).*_)?layers?|depth|num_hidden_blocks", LAYERS),
)
LENGTHS: Sizes = (
    (r"max_source_positions|source_length|max_audio_positions", 32),
    (r"image_size|pretrain_image_size|crop_size", 64),
    (r"frames_per_clip", 4),
    (r"mm_tokens_per_image", 4),
    (r"patch_size", 16),
)
WIDTHS: Sizes = (
    (r"(.*_)?codebook_size", 128),
    (r"qk_head_dim", 2 * HEAD_DIM),
    (r"mamba_(n|num)_heads", HEADS),
    (r"mamba_(d_head|head_dim)", 2 * WIDTH // HEADS),
    (r"linear_num_value_heads", HEADS),
    (r"linear_num_key_heads", KV_HEADS),
    (r"(.*_)?num_key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num", KV_HEADS),
    (r"qk_nope_head_dim|qk_rope_head_dim|v_head_dim|(.*_)?head_dim|d_kv|d_head|dim_head", HEAD_DIM),
    (r"rotary_dim", HEAD_DIM),
    (r"(num_|n_|.*_)?(attention_)?heads|n_head|nhead|.*_num_attention_heads", HEADS),
    (r"query_pre_attn_scalar", HEAD_DIM),
    (
        r"(.*_)?(intermediate_size|ffn_dim|ffn_hidden_size|intermediate_dim)|d_ff|d_inner|mlp_dim",
        96,
    ),
    (r".*_lora_rank", 32),
    (r"(.*_)?(hidden_size|d_model|n_embd|embed_dim|hidden_dim|dim|emb_dim|embedding_size)", WIDTH),
)
# From small to large: what a class does not build or run with is tried with its own sizes.
LEVELS: tuple[Sizes, ...] = (COUNTS + LENGTHS + WIDTHS, COUNTS + LENGTHS, COUNTS)
PER_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types")
UP_TO = ("max_position_embeddings", "n_positions")
LAYER_NUMBERS = (
    r"(global_attn|fullatt_block|deepstack_visual)_indexes"
    r"|global_attention_blocks|intermediate_layers_indices"
)
MANY = 1024
NEVER_MORE = "patch_size|expert"
IGNORED_IN_ROPE = "ignore_keys_at_rope_validation"
NEEDED = (
    "vocab_size",
    "n_routed_experts",
    "head_dim",
    "num_key_value_heads",
    "num_experts_per_tok",
)


def shrunk(config: type[PreTrainedConfig], *, sizes: Sizes = LEVELS[0]) -> PreTrainedConfig:
    """A small configuration of a class."""
    return _shrunk(config(), sizes)


def _shrunk(like: PreTrainedConfig, sizes: Sizes) -> PreTrainedConfig:
    """A small configuration that is otherwise like one: what its owner chose for it is kept."""
    config = type(like)
    own = OVERRIDES.get(config.model_type, {})
    names = {field.name for field in dataclasses.fields(config)}
    values = {name: value for name, value in vars(like).items() if name in names}
    usual = vars(config())
    small = {name: _small(name, value, sizes) for name, value in values.items()}
    heads = values.get("num_attention_heads")
    if values.get("num_key_value_heads", -1) == heads and small["num_attention_heads"] != heads:
        small["num_key_value_heads"] = HEADS  # where they are no fewer they may have to be as many
    changed = {
        name: x
        for name, x in small.items()
        if x is not values[name] or values[name] != usual.get(name)
    }
    if WIDTHS[0] in sizes and "mrope_section" in getattr(config, IGNORED_IN_ROPE, ()):
        changed["rope_parameters"] = _sections(like, changed.get("rope_parameters"))
    changed |= _layers(values)
    changed |= _features(like, values)
    return config(**{**changed, **own})


def _features(like: PreTrainedConfig, values: dict[str, Any]) -> dict[str, Any]:
    """As many feature maps as a backbone had, each after a layer of its own."""
    features = getattr(like, "_out_features", None)
    if not features or len(features) == 1:
        return {}
    count = "num_hidden_layers"
    if not isinstance(values.get(count), int) or "depths" in values:
        return {"out_features": list(features)}
    layers = range(len(features))
    return {count: max(LAYERS, len(features)), "out_features": [f"stage{n + 1}" for n in layers]}


def _small(name: str, value: Any, sizes: Sizes) -> Any:
    if isinstance(value, PreTrainedConfig):
        return _shrunk(value, sizes)
    is_narrow = WIDTHS[0] in sizes
    if isinstance(value, dict) and name.startswith("rope"):
        return _rope(value) if is_narrow else value
    if is_narrow and name == "num_heads" and isinstance(value, (list, tuple)):
        # The widths are powers of 2.
        return type(value)(1 << min(n, HEADS).bit_length() - 1 for n in value)
    if name == "depths" and isinstance(value, (list, tuple)):
        return type(value)(min(n, LAYERS) for n in value)
    if value is None and name in NEEDED:
        return HEADS if name == "num_key_value_heads" else _size(name, None, sizes)
    if is_narrow and re.fullmatch(LAYER_NUMBERS, name) and isinstance(value, (list, tuple)):
        return type(value)(dict.fromkeys(min(n, LAYERS - 1) for n in value))
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    return _size(name, value, sizes)


def _size(name: str, value: int | None, sizes: Sizes) -> int | None:
    if value is not None and value < 0:
        return value  # counted from the end
    for pattern, size in sizes:
        if re.fullmatch(pattern, name):
            is_small = value is not None and value < size
            return value if is_small and re.search(NEVER_MORE, name) else size
    if re.fullmatch(r".*_(token_id|token_index)", name):
        # The same name is the same token in every part of a model.
        return SPECIAL + sum(map(ord, name)) % 97
    return min(value, MANY) if value is not None and name in UP_TO else value


def _rope(value: dict[str, Any]) -> dict[str, Any]:
    """Factors for no more than half a head."""
    small = {}
    for key, each in value.items():
        if isinstance(each, dict):
            small[key] = _rope(each)
        elif key in ("long_factor", "short_factor"):
            small[key] = each[: HEAD_DIM // 2]
        else:
            small[key] = each
    return small


def _sections(default: PreTrainedConfig, small: dict[str, Any] | None) -> dict[str, Any]:
    """Rotary sections of time, height and width that add up to half of what is rotated."""
    rope = dict(small or getattr(default, "rope_parameters", None) or {"rope_type": "default"})
    partial = rope.get("partial_rotary_factor", getattr(default, "partial_rotary_factor", 1.0))
    half = int(HEAD_DIM * (partial or 1.0)) // 2
    rope.setdefault("rope_theta", 10000.0)
    third = (half + 1) // 3
    return rope | {"mrope_section": [third, third, half - 2 * third]}


def _layers(values: dict[str, Any]) -> dict[str, Any]:
    """One layer of each kind, in all lists that have an entry for each layer."""
    count = next((name for name in ("num_hidden_layers", "num_layers") if name in values), None)
    length = values.get(count) if count else None
    if not isinstance(length, int):
        return {}
    listed = {
        name: value
        for name, value in values.items()
        if isinstance(value, (list, tuple)) and len(value) == length and length > LAYERS
    }
    kinds = list(zip(*(listed[name] for name in PER_LAYER if name in listed), strict=True))
    chosen = [kinds.index(kind) for kind in dict.fromkeys(kinds)] or [0, 1]
    chosen = (chosen + [n for n in range(length) if n not in chosen])[: max(LAYERS, len(chosen))]
    picked: dict[str, Any] = {
        name: type(value)(value[n] for n in sorted(chosen)) for name, value in listed.items()
    }
    return picked | {count: len(chosen)} if count else picked
