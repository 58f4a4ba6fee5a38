"""Attention settings in a config.json: the layout, and counts that no tensor shape gives."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from headwise.errors import OptionError
from headwise.layouts.axis_sizes import Sizes
from headwise.support.axes import describe_value

Config = Mapping[str, Any]

_LONGEST = 200  # characters of a name
_LARGEST = 2**31 - 1

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

_MOST = 2**20  # heads or channels: every number that divides the heads may be tried

_ROTATE_IN_WINDOWS = ("cohere2", "exaone4", "exaone_moe")  # and not where all is seen

_WINDOWS_EVERYWHERE = ("mistral", "mixtral", "phi3", "starcoder2")

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
_KNOWN = {*_LAYOUTS, "falcon", "gpt_bigcode"}  # the last two differ by their switches


class ConfigFields(dict[str, Any]):
    """A JSON object of a config, whose fields are read by their types.

    A field that is absent or null reads as None. A value of another type is an OptionError that
    names the file, the field, the value and the type.
    """

    def __init__(self, values: Mapping[str, Any], *, place: str = "the config") -> None:
        super().__init__(values)
        self.place = place

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ConfigFields:
        """Return the config with readers; one that has them keeps its place."""
        return config if isinstance(config, ConfigFields) else cls(config)

    def _checked(self, name: str, needed: str, is_it: Callable[[Any], bool]) -> Any:
        """The value of a field that is there, if it is what is needed."""
        value = self.get(name)
        if value is not None and not is_it(value):
            raise self._refused(name, needed)
        return value

    def count(self, name: str, *, most: int = _LARGEST) -> int | None:
        """A whole number from 1; None also where a list gives one for each of several parts."""
        if isinstance(self.get(name), list):
            return None
        value = self._checked(
            name,
            f"a whole number from 1 to {most}",
            lambda n: _is_number(n) and 0 < n <= most and n == int(n),
        )
        return None if value is None else int(value)

    def number(self, name: str) -> float | None:
        """A finite number."""
        value = self._checked(name, "a finite number", _is_number)
        return None if value is None else float(value)

    def positive(self, name: str) -> float | None:
        """A finite number above 0; None also for 0, which switches off what it is for."""
        value = self.number(name)
        if value is not None and value < 0:
            raise self._refused(name, "a positive number")
        return value or None

    def needed(self, name: str) -> float:
        """A finite number that must be there."""
        value = self.number(name)
        if value is None:
            raise self._refused(name, "a finite number")
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        """True or false, or 1 or 0."""
        is_flag = "true or false", lambda x: isinstance(x, int) and x in (0, 1)
        value = self._checked(name, *is_flag)
        return default if value is None else bool(value)

    def text(self, name: str) -> str | None:
        """A name, which an answer may print."""
        value: str | None = self._checked(
            name,
            f"a text of at most {_LONGEST} printable characters",
            lambda x: isinstance(x, str) and len(x) <= _LONGEST and x.isprintable(),
        )
        return value

    def items_of(self, name: str) -> list[Any]:
        """A list, one value for each layer; empty where there is none."""
        needed = "a list with a value for each layer"
        return list(self._checked(name, needed, lambda x: isinstance(x, list | tuple)) or ())

    def inner(self, name: str) -> ConfigFields | None:
        """A JSON object within this one."""
        value = self._checked(name, "a JSON object", lambda x: isinstance(x, dict))
        return None if value is None else ConfigFields(value, place=f"{name} of {self.place}")

    def _refused(self, name: str, needed: str) -> OptionError:
        value = self.get(name)
        described = "not there" if value is None else describe_value(value)
        return OptionError(
            saw=f"{name} in {self.place} is {described}",
            needed=f"{name}: {needed}",
            do="write the value that the model's publisher gives",
        )


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max


def read_config(place: Path) -> ConfigFields:
    """The config.json in a folder, or beside a file; empty where there is none.

    Raises:
        OptionError: it is no JSON object. Its fields are checked where they are read.
    """
    path = (place if place.is_dir() else place.parent) / "config.json"
    if not path.is_file():
        return ConfigFields({}, place=str(path))
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        seen = f"which holds a {type(found).__name__}"
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or numbers beyond reason
        found, seen = None, f"which is no JSON: {error}"
    except OSError as error:
        found, seen = None, f"which cannot be read: {error.strerror}"
    if not isinstance(found, dict):
        raise OptionError(
            saw=f"{path}, {seen}",
            needed="the config of a model: a JSON object",
            do="mend or remove it, and give {heads} and {kv_heads}",
            parameter={"heads": (), "kv_heads": ()},
        )
    return ConfigFields(found, place=str(path))


def counts_of(config: Config) -> Sizes:
    """heads, kv_heads, head_dim and rotary_width, as far as they are said.

    A config of several models, of text and of pictures, says what all of them have alike.

    Raises:
        OptionError: a count that is no whole number from 1.
    """
    fields = ConfigFields.of(config)
    towers = [name for name in fields if name.endswith("_config")]
    inner = (fields.inner(name) for name in towers if isinstance(fields[name], dict))
    others = [_counts(tower) for tower in inner if tower is not None]
    sides = (_first_count(fields, [f"{side}_attention_heads"]) for side in ("encoder", "decoder"))
    others += [{"heads": heads} for heads in sides if heads is not None]
    return {
        name: count
        for name, count in _counts(text_of(fields)).items()
        if all(other.get(name, count) == count for other in others)
    }


def known_counts(config: Config, given: Mapping[str, int | None], *, place: Path) -> dict[str, int]:
    """heads, kv_heads and so on, from both.

    Raises:
        OptionError: they contradict each other, or a count is below 1.
    """
    said = counts_of(config)
    wanted = {name: count for name, count in given.items() if count is not None}
    for name, count in wanted.items():
        if count < 1:
            raise OptionError(saw=f"{name} {count}", needed="1 or more", do="give the model's own")
        if said.get(name, count) != count:
            raise OptionError(
                saw=f"{name} {count}, where the config in {place} says {said[name]}",
                needed="one count: with another one, rows are moved to wrong places",
                do=f"leave out {{{name}}}, or mend the config",
                parameter=name,
            )
    return said | wanted


def _counts(fields: ConfigFields) -> Sizes:
    counts = {size: _first_count(fields, names) for size, names in _NAMES.items()}
    if fields.flag("multi_query") and not fields.flag("new_decoder_architecture"):
        counts["kv_heads"] = 1
    # attn_config.kv_n_heads and the like stand one level lower.
    inner = fields.inner("attn_config") or ConfigFields({})
    counts["kv_heads"] = inner.count("kv_n_heads", most=_MOST) or counts["kv_heads"]
    found = {size: count for size, count in counts.items() if count is not None}
    share = _share(fields)
    if share is not None and "rotary_width" not in found:
        head_dim = head_dim_of(fields, found)
        if head_dim:
            found["rotary_width"] = int(head_dim * share)
    return found


def _first_count(fields: ConfigFields, names: Iterable[str]) -> int | None:
    counts = (fields.count(name, most=_MOST) for name in names)
    return next((count for count in counts if count is not None), None)


def text_of(config: Config) -> ConfigFields:
    """The part that describes the language model, where there is one beside others."""
    fields = ConfigFields.of(config)
    return fields.inner("text_config") or fields


def rotation_of(config: Config, layer: int) -> ConfigFields:
    """What is said of the rotation in one layer; empty where nothing is, or not in one place."""
    fields = text_of(config)
    found = (fields.inner(name) for name in ("rope_parameters", "rope_scaling"))
    said = next((one for one in found if one is not None), ConfigFields({}, place=fields.place))
    kind = _listed(fields, "layer_types", layer) or "full_attention"
    return said.inner(kind) or said if isinstance(said.get(kind), dict) else said


def turns(config: Config, layer: int) -> bool | None:
    """Whether a layer rotates queries and keys; None where the config does not say.

    The rules are those of transformers: SmolLM3 and Llama 4 list the layers, Cohere 2 and
    EXAONE 4 rotate those with a window.
    """
    fields = text_of(config)
    if fields.items_of("no_rope_layers"):
        rotates = _listed(fields, "no_rope_layers", layer)
        return None if rotates is None else bool(rotates)  # 1 where it does, whatever the name says
    kinds, windows = fields.items_of("layer_types"), fields.get("sliding_window")
    if fields.text("model_type") in _ROTATE_IN_WINDOWS and windows and kinds:
        kind = _listed(fields, "layer_types", layer)
        return None if kind is None else bool(kind == "sliding_attention")
    if (kind := fields.text("position_embedding_type")) in ("absolute", "rotary"):
        return bool(kind == "rotary")
    return True if any(fields.get(name) for name in _ROTATIONS) else None


def window_of(config: Config, layer: int) -> int | None:
    """Return how many keys a query of a layer sees, its own included; None for all of them.

    Raises:
        OptionError: the config has a window, and does not say which layers have it.
    """
    fields = text_of(config)
    size = fields.count("sliding_window") or fields.count("window_size")
    size = size or fields.count("local_attention")
    if size is None or not fields.flag("use_sliding_window", default=True):
        return None
    kinds = fields.items_of("layer_types") or fields.items_of("attention_layers")
    if layer < len(kinds) and kinds[layer] in ("full_attention", "global"):
        return None
    if "local_attention" not in fields:  # of which half is on each side
        if layer < len(kinds) and kinds[layer] in ("sliding_attention", "local"):
            return size
        if not kinds and fields.text("model_type") in _WINDOWS_EVERYWHERE:
            return size
    raise OptionError(
        saw=f"a window of {size} keys in {fields.place}, and none for layer {layer} by itself",
        needed="layer_types in the config, or the window of this layer",
        do="give window=(left, right) for this layer, or window=None if it sees all keys",
    )


def _listed(fields: ConfigFields, name: str, layer: int) -> Any:
    """What a list over the layers says of one; None for a layer that it does not reach."""
    said = fields.items_of(name)
    return said[layer] if layer < len(said) else None


def layout_of(config: Config) -> str | None:
    """The name of the layout that files of this model have; None where it is not known."""
    fields = ConfigFields.of(config)
    while (kind := fields.text("model_type")) not in _KNOWN and "text_config" in fields:
        inner = text_of(fields)
        if inner is fields:
            break
        fields = inner
    if kind == "falcon":
        if fields.flag("new_decoder_architecture"):
            return "falcon-40b"
        return "falcon-7b" if fields.flag("multi_query") else "falcon-rw"
    if kind == "gpt_bigcode":
        multi = fields.flag("multi_query", default=True)
        return "gpt-bigcode-mqa" if multi else "gpt-bigcode-mha"
    return _LAYOUTS.get(kind or "")


def _share(fields: ConfigFields) -> float | None:
    rotation = rotation_of(fields, 0)
    for name in _SHARES:
        share = fields.number(name) if name in fields else rotation.number(name)
        if share is not None and 0 < share <= 1:
            return share
    return None


def head_dim_of(fields: ConfigFields, counts: Sizes) -> int | None:
    """As it is said, or the width over the heads."""
    width = _first_count(fields, ("hidden_size", "n_embd"))
    whole = width // counts["heads"] if width and "heads" in counts else None
    return counts.get("head_dim", whole)
