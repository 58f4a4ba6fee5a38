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
    "heads": (
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_heads",
        "attention_heads",
        "encoder_attention_heads",
        "decoder_attention_heads",
    ),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("head_dim", "d_kv", "kv_channels", "attention_head_size"),
    "rotary_width": ("rotary_dim",),
}
_SHARES = ("partial_rotary_factor", "rotary_pct")  # of head_dim that is rotated
_ROTATIONS = ("rope_parameters", "rope_scaling", "rope_theta", "rotary_emb_base", *_SHARES)

_ROTATE_IN_WINDOWS = ("cohere2", "exaone4", "exaone_moe")  # and not where all is seen

# model_type -> the layout of its files, where names and shapes leave several.
_LAYOUTS = {
    kind: layout
    for layout, kinds in {
        "bart": "bart mbart marian pegasus m2m_100 blenderbot blenderbot-small plbart mvp",
        "bert": "bert bert-generation camembert data2vec-text dpr electra ernie layoutlm markuplm "
        "megatron-bert rembert roberta roc_bert splinter tapas visual_bert xlm-roberta xmod",
        "bloom": "bloom",
        "chameleon": "chameleon",
        "clip": "clip clip_text_model clip_vision_model siglip siglip_text_model "
        "siglip_vision_model",
        "codegen": "codegen",
        "cohere": "cohere cohere2 ernie4_5 ernie4_5_moe helium",
        "dbrx": "dbrx",
        "deberta": "deberta",
        "deberta-v2": "deberta-v2",
        "dinov3": "dinov3_vit",
        "distilbert": "distilbert",
        "esm": "esm",
        "gemma2": "gemma2",
        "gemma3": "gemma3 gemma3_text",
        "glm": "glm glm4",
        "gpt-neo": "gpt_neo",
        "gpt-oss": "gpt_oss",
        "gpt2": "gpt2 imagegpt openai-gpt",
        "gptj": "gptj",
        "granite": "granite granitemoe granitemoeshared hyperclovax",
        "hunyuan": "hunyuan_v1_dense",
        "internlm2": "internlm2",
        "lfm2": "lfm2",
        "llama": "arcee cwm gemma llama mistral mixtral olmo phimoe seed_oss smollm3",
        "modernbert": "modernbert",
        "mpt": "mpt",
        "mpnet": "mpnet",
        "nemotron": "nemotron stablelm",
        "neox": "gpt_neox",
        "olmo2": "olmo2 olmo3",
        "opt": "biogpt opt xglm",
        "persimmon": "fuyu persimmon",
        "phi": "phi",
        "phi3": "phi3 phi4_multimodal",
        "qwen2": "qwen2 qwen2_5_vl_text qwen2_moe qwen2_vl_text",
        "qwen3": "apertus dots1 qwen3 qwen3_moe qwen3_vl_text",
        "starcoder2": "starcoder2",
        "t5": "mt5 t5",
        "umt5": "umt5",
        "vit": "audio-spectrogram-transformer beit deit dinov2 dpt flava ijepa vit vit_mae "
        "vit_msn vivit yolos",
        "vitdet": "vitdet",
        "wav2vec2": "data2vec-audio hubert sew unispeech unispeech-sat wav2vec2",
        "whisper": "whisper",
        "xlnet": "xlnet",
    }.items()
    for kind in kinds.split()
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
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or numbers beyond reason
        raise _refused(path, f"which is no JSON: {error}") from error
    except OSError as error:
        raise _refused(path, f"which cannot be read: {error.strerror}") from error
    if not isinstance(found, dict):
        raise _refused(path, f"which holds a {type(found).__name__}")
    return found


def counts_of(config: Config) -> Sizes:
    """heads, kv_heads, head_dim and rotary_width, as far as they are said.

    A config of several models, of text and of pictures, says what all of them have alike.
    """
    towers = (config[name] for name in config if name.endswith("_config"))
    others = [_counts(one) for one in towers if isinstance(one, dict)]
    sides = [config.get(f"{side}_attention_heads") for side in ("encoder", "decoder")]
    others += [{"heads": heads} for heads in sides if isinstance(heads, int)]
    return {
        name: count
        for name, count in _counts(text_of(config)).items()
        if all(other.get(name, count) == count for other in others)
    }


def head_dim_of(config: Config) -> int | None:
    """As it is said, or the width over the heads."""
    return _head_dim(text_of(config), counts_of(config))


def _counts(config: Config) -> Sizes:
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
        head_dim = _head_dim(config, counts)
        if head_dim:
            counts["rotary_width"] = int(head_dim * share)
    return counts


def text_of(config: Config) -> Config:
    """The part that describes the language model, where there is one beside others."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def rotation_of(config: Config, layer: int) -> Config:
    """What is said of the rotation in one layer; empty where nothing is, or not in one place."""
    config = text_of(config)
    found = (config.get(name) for name in ("rope_parameters", "rope_scaling"))
    said: Config = next((one for one in found if isinstance(one, dict)), {})
    inner = said.get(_listed(config, "layer_types", layer) or "full_attention")
    return inner if isinstance(inner, dict) else said


def turns(config: Config, layer: int) -> bool | None:
    """Whether a layer rotates queries and keys; None where the config does not say.

    The rules are those of transformers: SmolLM3 and Llama 4 list the layers, Cohere 2 and
    EXAONE 4 rotate those with a window.
    """
    config = text_of(config)
    if config.get("no_rope_layers"):
        rotates = _listed(config, "no_rope_layers", layer)
        return None if rotates is None else bool(rotates)  # 1 where it does, whatever the name says
    kinds = config.get("layer_types")
    if config.get("model_type") in _ROTATE_IN_WINDOWS and config.get("sliding_window") and kinds:
        kind = _listed(config, "layer_types", layer)
        return None if kind is None else bool(kind == "sliding_attention")
    if (kind := config.get("position_embedding_type")) in ("absolute", "rotary"):
        return bool(kind == "rotary")
    return True if any(config.get(name) for name in _ROTATIONS) else None


def _listed(config: Config, name: str, layer: int) -> Any:
    """What a list over the layers says of one; None for a layer that it does not reach."""
    said = config.get(name) or ()
    return said[layer] if layer < len(said) else None


def layout_of(config: Config) -> str | None:
    """The name of the layout that files of this model have; None where it is not known."""
    kind = config.get("model_type")
    if kind == "falcon":
        if config.get("new_decoder_architecture"):
            return "falcon-40b"
        return "falcon-7b" if config.get("multi_query") else "falcon-rw"
    if kind == "gpt_bigcode":
        return "gpt-bigcode-mqa" if config.get("multi_query", True) else "gpt-bigcode-mha"
    if kind not in _LAYOUTS and text_of(config) is not config:
        return layout_of(text_of(config))
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
    whole = width // counts["heads"] if width and "heads" in counts else None
    return counts.get("head_dim", whole)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _refused(path: Path, seen: str) -> OptionError:
    return OptionError(
        saw=f"{path}, {seen}",
        needed="the config of a model: a JSON object",
        do="mend or remove it, and give the counts in the call: heads, kv_heads",
    )
