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
_ROTATIONS = ("rope_parameters", "rope_scaling", "rope_theta", "rotary_emb_base", *_SHARES)

_ROTATE_IN_WINDOWS = ("cohere2", "exaone4", "exaone_moe")  # and not where all is seen

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
    config = text_of(config)
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


def text_of(config: Config) -> Config:
    """The part that describes the language model, where there is one beside others."""
    inner: Config | None = config.get("text_config")
    return inner or config


def rotation_of(config: Config, layer: int) -> Config:
    """What is said of the rotation in one layer; empty where nothing is, or not in one place."""
    config = text_of(config)
    said: Config = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kinds = config.get("layer_types") or ()
    inner = said.get(kinds[layer] if layer < len(kinds) else "full_attention")
    return inner if isinstance(inner, dict) else said


def turns(config: Config, layer: int) -> bool | None:
    """Whether a layer rotates queries and keys; None where the config does not say.

    The rules are those of transformers: SmolLM3 and Llama 4 list the layers, Cohere 2 and
    EXAONE 4 rotate those with a window.
    """
    config = text_of(config)
    if listed := config.get("no_rope_layers"):
        return bool(listed[layer])  # 1 where the layer does rotate, whatever the name says
    kinds = config.get("layer_types") or ()
    if config.get("model_type") in _ROTATE_IN_WINDOWS and config.get("sliding_window") and kinds:
        return bool(kinds[layer] == "sliding_attention")
    return True if any(config.get(name) for name in _ROTATIONS) else None


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
    rotation = rotation_of(config, 0)
    for name in _SHARES:
        share = config.get(name, rotation.get(name))
        if isinstance(share, (int, float)) and 0 < share <= 1:
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
