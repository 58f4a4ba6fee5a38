"""What a model's config.json says of its attention: counts that no shape tells, and the layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwise.errors import OptionError
from headwise.layouts.sizes import Sizes

Config = Mapping[str, Any]

# What a count is called; the first that is there is taken.
_NAMES = {
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("head_dim", "d_kv", "kv_channels", "attention_head_size"),
    "rotary_width": ("rotary_dim",),
}
_SHARES = ("partial_rotary_factor", "rotary_pct")  # of head_dim that is rotated

# model_type -> the layout of its files, where names and shapes leave several.
_LAYOUTS = {
    "bert": "bert",
    "bloom": "bloom",
    "codegen": "codegen",
    "cohere": "cohere",
    "cohere2": "cohere",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    "glm": "glm",
    "glm4": "glm",
    "gpt2": "gpt2",
    "gpt_neo": "gpt-neo",
    "gpt_neox": "neox",
    "gpt_oss": "gpt-oss",
    "gptj": "gptj",
    "granite": "granite",
    "internlm2": "internlm2",
    "llama": "llama",
    "mistral": "llama",
    "mpt": "mpt",
    "olmo2": "olmo2",
    "persimmon": "persimmon",
    "phi": "phi",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "t5": "t5",
    "umt5": "umt5",
    "whisper": "whisper",
}


def read_config(place: Path) -> Config:
    """The config.json in a folder, or beside a file; empty where there is none.

    Raises:
        OptionError: it is no JSON object.
    """
    path = (place if place.is_dir() else place.parent) / "config.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise _refused(path, f"which is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise _refused(path, f"which holds a {type(found).__name__}")
    return found


def counts_of(config: Config) -> Sizes:
    """heads, kv_heads, head_dim and rotary_width, as far as they are said."""
    config = config.get("text_config") or config
    found = {
        size: next((config[name] for name in names if _is_count(config.get(name))), None)
        for size, names in _NAMES.items()
    }
    counts = {size: count for size, count in found.items() if count is not None}
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        counts["kv_heads"] = 1
    # attn_config.kv_n_heads and the like stand one level lower.
    inner = config.get("attn_config")
    if isinstance(inner, dict) and _is_count(inner.get("kv_n_heads")):
        counts["kv_heads"] = inner["kv_n_heads"]
    share = _share(config)
    if share is not None and "rotary_width" not in counts:
        head_dim = counts.get("head_dim") or _head_dim(config, counts)
        if head_dim:
            counts["rotary_width"] = int(head_dim * share)
    return counts


def layout_of(config: Config) -> str | None:
    """The name of the layout that files of this model have; None where it is not known."""
    kind = config.get("model_type")
    if kind == "falcon":
        if config.get("new_decoder_architecture"):
            return "falcon-40b"
        return "falcon-7b" if config.get("multi_query") else "falcon-rw"
    if kind == "gpt_bigcode":
        return "gpt-bigcode-mqa" if config.get("multi_query", True) else "gpt-bigcode-mha"
    return _LAYOUTS.get(str(kind))


def _share(config: Config) -> float | None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for name in _SHARES:
        share = config.get(name, rope.get(name) if isinstance(rope, dict) else None)
        if isinstance(share, (int, float)) and 0 < share < 1:
            return float(share)
    return None


def _head_dim(config: Config, counts: Sizes) -> int | None:
    width = next((config[n] for n in ("hidden_size", "n_embd") if _is_count(config.get(n))), None)
    return width // counts["heads"] if width and "heads" in counts else None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _refused(path: Path, seen: str) -> OptionError:
    return OptionError(
        saw=f"{path}, {seen}",
        needed="the config of a model: a JSON object",
        do="mend or remove it, and give the counts in the call: heads, kv_heads",
    )
