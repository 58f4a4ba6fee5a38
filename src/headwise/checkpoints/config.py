"""Attention settings in a config.json: the layout, and counts that no tensor shape gives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from headwise.checkpoints.fields import Config, ConfigFields
from headwise.checkpoints.forms import read_pairs, read_place_terms, read_places
from headwise.checkpoints.rotations import PLANES, read_axes, read_scaling, rotary_scaling_kind
from headwise.checkpoints.source import require_no_pointer
from headwise.errors import OptionError
from headwise.function import spec
from headwise.function.rotary import Rotary
from headwise.function.scaling import ProportionalScaling, yarn_magnitude
from headwise.function.spec import ABSENT, FROM_CONFIG, USUAL_SCALE, AttentionSpec, RotaryRule
from headwise.layouts import registry
from headwise.layouts._layout import Layout
from headwise.layouts.pattern import Sizes
from headwise.support.files import parse_json_object
from headwise.support.text import describe_value

_MAX_HEADS = 2**20  # heads or channels: detection may try every divisor of the heads

# The model_type of a cut model in a class of its own, and the field that has the model_type of its
# original and the counts of each layer; see `headwise.surgery.code`.
CUT = "headwise_cut"
# count -> its names in a config, by spaces; the first name that is present counts.
NAMES = {
    "heads": "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads "
    "decoder_attention_heads encoder_num_attention_heads decoder_num_attention_heads "
    "resampler_n_heads",
    "kv_heads": "num_key_value_heads num_kv_heads n_head_kv multi_query_group_num",
    "head_dim": "head_dim d_kv kv_channels attention_head_size resampler_head_dim",
    "rotary_width": "rotary_dim",
}
_SHARES = ("rotary_pct", "partial_rotary_factor")  # rotated share of head_dim
_THETAS = ("rotary_emb_base", "global_rope_theta", "rope_theta")  # in older files
_ROTATIONS = ("rope_parameters", "rope_scaling", "rope_theta", "rotary_emb_base", *_SHARES)

# Their layers without a window do not rotate.
_ROTATE_IN_WINDOWS = ("afmoe", "cohere2", "exaone4", "exaone_moe")
_MAY_CLIP = ("llama", "olmo2")  # OLMo, OLMoE
_NORM_WITH_ROTATION = ("llama4", "llama4_text")  # layers that do not rotate do not normalise
_TWO_SIDED = ("gemma3", "gemma3_text")  # with use_bidirectional_attention
_WINDOWS_EVERYWHERE = ("mistral", "mixtral", "phi3", "starcoder2")

# model_type -> the layout of its files, where tensor names and shapes fit several layouts; those of
# _OWN have the name of their model_type.
_OWN = (
    "afmoe bitnet bloom chameleon codegen dbrx deberta deberta-v2 diffllama distilbert esm gemma2 "
    "gptj internlm2 laguna lfm2 lfm3 modernbert mpt mpnet nanochat phi starcoder2 umt5 vitdet "
    "whisper xlnet"
)
_LAYOUTS = dict(zip(_OWN.split(), _OWN.split(), strict=True)) | {
    kind: layout
    for layout, kinds in {
        "bart": "bart mbart marian pegasus m2m_100 blenderbot blenderbot-small plbart mvp",
        "bert": "bert bert-generation camembert data2vec-text dpr electra ernie layoutlm markuplm "
        "megatron-bert rembert roberta roc_bert splinter tapas visual_bert xlm-roberta xmod",
        "clip": "clip clip_text_model clip_vision_model siglip siglip_text_model "
        "siglip_vision_model",
        "bailing-hybrid": "bailing_hybrid",
        "cohere": "cohere cohere2 ernie4_5 ernie4_5_moe helium",
        "deepseek": "axk1 deepseek_v2 deepseek_v3 glm4_moe_lite kimi_k2 mistral4 youtu",
        "dinov3": "dinov3_vit",
        "gemma3": "gemma3 gemma3_text",
        "gemma4": "gemma3n_text gemma4_text gemma4_unified_text",
        "glm": "glm glm4",
        "gpt-neo": "gpt_neo",
        "gpt-oss": "gpt_oss",
        "gpt2": "gpt2 imagegpt openai-gpt",
        "granite": "granite granitemoe granitemoeshared hyperclovax",
        "hunyuan": "hunyuan_v1_dense",
        "kimi-linear": "kimi_linear",
        "llama": "arcee cwm gemma llama ministral3 mistral mixtral olmo phimoe seed_oss smollm3",
        "llama4": "llama4 llama4_text",
        "longcat-flash": "longcat_flash",
        "mimo": "mimo_v2_flash",
        "minicpm3": "minicpm3",
        "muse": "muse_spark_text",
        "muse-glimmer": "muse_glimmer_text",
        "nemotron": "nemotron stablelm",
        "neox": "gpt_neox",
        "olmo2": "olmo2 olmo3",
        "opt": "biogpt opt xglm",
        "persimmon": "fuyu persimmon",
        "phi3": "phi3 phi4_multimodal",
        "qwen2": "qwen2 qwen2_5_vl_text qwen2_moe qwen2_vl_text",
        "qwen3-next": "qwen3_next qwen3_5_text",
        "qwen3": "apertus dots1 qwen3 qwen3_moe qwen3_vl_text",
        "step3p7": "step3p5 step3p7",
        "t5": "mt5 t5",
        "vit": "audio-spectrogram-transformer beit deit dinov2 dpt flava ijepa vit vit_mae "
        "vit_msn vivit yolos",
        "wav2vec2": "data2vec-audio hubert sew unispeech unispeech-sat wav2vec2",
    }.items()
    for kind in kinds.split()
}
_KNOWN = {*_LAYOUTS, "falcon", "gpt_bigcode"}  # flags of the config decide the last two


# Fields that the classes of transformers set by themselves where a config.json leaves them out:
# defaults of `transformers.models.*.configuration_*` that change attention and differ from what
# this file takes for a missing field. `tools/config_fields.py` checks them.
_FIELDS: tuple[tuple[str, Any, str], ...] = (
    ("rope_theta", 25_000.0, "fuyu"),
    ("rope_theta", 100_000.0, "helium"),
    ("rope_theta", 500_000.0, "cohere ernie4_5 ernie4_5_moe olmo3 qwen3_vl_text"),
    ("rope_theta", 1e6, "gemma3_text lfm2 mixtral phimoe qwen2_5_vl_text qwen2_vl_text"),
    ("rope_theta", 2_000_000.0, "smollm3"),
    ("rope_theta", 6_000_000.0, "bailing_hybrid"),
    ("rope_theta", 1e7, "longcat_flash"),
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


def read_config(path: Path) -> ConfigFields:
    """Return the config.json in a folder, or beside a file; empty where there is none.

    That of a cut model in a class of its own (`CUT`) has the model_type of its original.

    Raises:
        OptionError: config.json holds no JSON object. Its fields are checked on access.
    """
    path = (path if path.is_dir() else path.parent) / "config.json"
    if not path.is_file():
        return ConfigFields({}, origin=str(path))
    try:
        values = parse_json_object(path.read_bytes(), unique=False)
        if values.get("model_type") == CUT and isinstance(values.get(CUT), dict):
            values["model_type"] = values[CUT].get("model_type")
        return ConfigFields(values, origin=str(path))
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError):
            require_no_pointer(path)
        reason = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else error
        raise OptionError(
            saw=f"{path} {reason}",
            needed="the config of a model: a JSON object",
            do="repair the file, or download it again",
        ) from error


def read_stated_counts(config: Config) -> Sizes:
    """Return heads, kv_heads, head_dim and rotary_width, as far as the config states them.

    From a config of several models, such as text and vision, only counts that all share are used.

    Raises:
        OptionError: a count is no whole number from 1.
    """
    fields = ConfigFields.wrap(config)
    towers = [name for name in fields if name.endswith("_config")]
    inner = (fields.section(name) for name in towers if isinstance(fields[name], dict))
    others = [_read_counts(tower) for tower in inner if tower is not None]
    for name in NAMES["heads"].split():
        if name.startswith(("encoder", "decoder")):
            heads = fields.count(name, most=_MAX_HEADS)
            others += [] if heads is None else [{"heads": heads}]
    return {
        name: count
        for name, count in _read_counts(text_config(fields)).items()
        if all(other.get(name, count) == count for other in others)
    }


def merge_counts(
    config: Config, counts: Mapping[str, int | None], *, origin: Path
) -> dict[str, int]:
    """Return heads, kv_heads and so on, from the config and from the caller.

    Raises:
        OptionError: the two contradict each other, or a count is below 1.
    """
    for name, count in counts.items():
        if count is not None and count < 1:
            raise OptionError(saw=f"{name} {count}", needed="1 or more", do="use the model's")
    return merge_stated_counts(read_stated_counts(config), counts, origin=f"the config in {origin}")


def merge_stated_counts(
    stated: Mapping[str, int], counts: Mapping[str, int | None], *, origin: str
) -> dict[str, int]:
    """Return counts that ``origin`` states together with the caller's, where None means unknown.

    Raises:
        OptionError: the two contradict each other.
    """
    known = {name: count for name, count in counts.items() if count is not None}
    for name, count in known.items():
        if stated.get(name, count) != count:
            raise OptionError(
                saw=f"{name} {count}, where {origin} says {stated[name]}",
                needed="the count of the model: another one moves rows to wrong places",
                do=f"leave out {{{name}}}, or correct the config of the weights",
                parameter=name,
            )
    return {**stated, **known}


def _read_counts(fields: ConfigFields) -> Sizes:
    if fields.get("kv_lora_rank") is not None:
        return _read_counts_with_latent(fields)
    counts = {size: _read_first_count(fields, names.split()) for size, names in NAMES.items()}
    if _has_two_heads(fields):
        counts |= {"head_dim": None, "kv_heads": None}
    if fields.text("model_type") == "mimo_v2_flash":  # layers with a window have twice as many
        counts["kv_heads"] = None
    if of_layers := {*fields.layer_values("num_attention_heads_per_layer")}:  # Laguna
        counts["heads"] = of_layers.pop() if len(of_layers) == 1 else None
    if fields.flag("multi_query") and not fields.flag("new_decoder_architecture"):
        counts["kv_heads"] = 1
    # MPT and DBRX have kv_n_heads in attn_config.
    inner = fields.section("attn_config") or ConfigFields({})
    counts["kv_heads"] = inner.count("kv_n_heads", most=_MAX_HEADS) or counts["kv_heads"]
    sizes = {size: count for size, count in counts.items() if count is not None}
    layers = range(len(fields.layer_values("layer_types")) or 1)
    widths = {_read_share_of_head(fields, sizes, layer) for layer in layers}
    width, head_dim = widths.pop(), read_head_dim(fields, sizes)
    if head_dim and (fields.section("pruned_heads") or fields.section(CUT)):
        sizes = {"head_dim": head_dim}  # each layer has heads of its own number
    if width is not None and not widths and "rotary_width" not in sizes:
        sizes["rotary_width"] = width + width % 2  # transformers turns whole pairs
    return sizes


def _read_counts_with_latent(fields: ConfigFields) -> Sizes:
    """Return the counts of heads whose keys come from a latent: head_dim states only what turns."""
    names = (f"qk_{part}_head_dim" for part in ("nope", "rope"))
    plain, turned = (fields.count(name) if fields.get(name) else None for name in names)  # 0: none
    counts = {
        "heads": _read_first_count(fields, NAMES["heads"].split()),
        "head_dim": plain + turned if plain and turned else None,
        "rotary_width": turned,
    }
    return {size: count for size, count in counts.items() if count is not None}


def _has_two_heads(fields: ConfigFields) -> bool:
    """True if layers without a window have heads of another size, as in Gemma 4."""
    return bool(fields.get("per_layer_config") or fields.get("global_head_dim"))


def _read_share_of_head(fields: ConfigFields, sizes: Sizes, layer: int) -> int | None:
    """Return the width of a rotation of a share of each head; None where no share is stated."""
    head_dim, rotation = read_head_dim(fields, sizes), rotary_section_of_layer(fields, layer)
    shares = (part.number(n) for n in _SHARES for part in (rotation, fields))
    share = next((share for share in shares if share is not None and 0 < share <= 1), None)
    if rotary_scaling_kind(rotation) == "proportional":  # all channels are in pairs
        return None
    return int(head_dim * share) if share is not None and head_dim else None


def _read_first_count(fields: ConfigFields, names: Iterable[str]) -> int | None:
    counts = (fields.count(name, most=_MAX_HEADS) for name in names)
    return next((count for count in counts if count is not None), None)


def text_config(config: Config) -> ConfigFields:
    """Return the section of the language model, else all of the config, with `DEFAULTS`."""
    fields = ConfigFields.wrap(config)
    fields = fields.section("text_config") or fields
    missing = DEFAULTS.get(fields.text("model_type") or "", {})
    return ConfigFields({**missing, **fields}, origin=fields.origin) if missing else fields


def find_other_part(config: Config, prefix: str) -> str | None:
    """Return the section of another part than the text model that a module's names name."""
    if "text_config" not in config or config.get("model_type") in _KNOWN:
        return None
    parts = (n for n, part in config.items() if n.endswith("_config") and isinstance(part, dict))
    words = {name: name.removesuffix("_config") for name in parts if name != "text_config"}
    return next((name for name, word in words.items() if word in prefix), None)


def rotary_section_of_layer(config: Config, layer: int) -> ConfigFields:
    """Return the rotary section that applies to a layer; empty where the config has none."""
    fields = text_config(config)
    sections = (fields.section(name) for name in ("rope_parameters", "rope_scaling"))
    empty = ConfigFields({}, origin=fields.origin)
    rotary = next((section for section in sections if section is not None), empty)
    kind = _layer_value(fields, "layer_types", layer) or "full_attention"
    if isinstance(rotary.get(kind), dict):
        return rotary.section(kind) or rotary
    name = fields.text("model_type") or ""
    if kind == "sliding_attention" and name in LOCAL_THETAS:
        field, usual = LOCAL_THETAS[name]
        scaling = rotary if name == "modernbert" else {}
        local = {**scaling, "rope_theta": fields.number(field) or usual}
        return ConfigFields(local, origin=fields.origin)
    return rotary


def layer_attends(config: Config, layer: int) -> bool:
    """Return False if a config of a hybrid model says that a layer has no softmax attention."""
    kind = str(_layer_value(text_config(config), "layer_types", layer) or "full_attention")
    named = ("hybrid", "hybrid_sliding", "minimax_m3_sparse")  # attend, and do not say so
    return kind in named or ("attention" in kind and "linear" not in kind)


def layer_rotates(config: Config, layer: int) -> bool | None:
    """Return True if a layer rotates queries and keys; None where the config does not say.

    The rules are those of transformers: SmolLM3 and Llama 4 list the layers; Cohere 2 and EXAONE 4
    rotate only in layers with a window; Falcon has ALiBi in place of a rotation.
    """
    fields = text_config(config)
    if fields.text("model_type") == "falcon":
        return not fields.flag("alibi")
    if fields.layer_values("no_rope_layers"):
        rotates = _layer_value(fields, "no_rope_layers", layer)
        return None if rotates is None else bool(rotates)  # 1 means rotary, in spite of the name
    if interval := fields.count("no_rope_layer_interval"):
        return (layer + 1) % interval != 0
    kinds, windows = fields.layer_values("layer_types"), fields.get("sliding_window")
    if fields.text("model_type") in _ROTATE_IN_WINDOWS and windows and kinds:
        kind = _layer_value(fields, "layer_types", layer)
        return None if kind is None else bool(kind == "sliding_attention")
    if (kind := fields.text("position_embedding_type")) in ("absolute", "rotary"):
        return bool(kind == "rotary")
    return True if any(fields.get(name) for name in _ROTATIONS) else None


def attention_window(config: Config, layer: int) -> int | None:
    """Return how many keys a query of a layer may attend to, itself included; None for all.

    Raises:
        OptionError: the config has a window, and does not say which layers have it.
    """
    fields = text_config(config)
    kinds = fields.layer_values("layer_types") or fields.layer_values("attention_layers")
    if not fields.flag("use_sliding_window", default=True):
        if "sliding_attention" in kinds[layer : layer + 1]:
            raise fields.field_error("use_sliding_window", "true, as layer_types needs it")
        return None
    if (size := window_size(fields)) is None:
        return None
    if layer < len(kinds) and kinds[layer] in ("full_attention", "global"):
        return None
    if "local_attention" not in fields:  # that window is centred: half on each side
        if layer < len(kinds) and kinds[layer] in ("sliding_attention", "local"):
            return size
        if not kinds and fields.text("model_type") in _WINDOWS_EVERYWHERE:
            return size
    raise OptionError(
        saw=f"{fields.origin} states a window of {size} keys, but not if layer {layer} has it",
        needed="layer_types in the config, or the window of this layer",
        do="pass window=(left, right) for this layer, or window=None if it attends to all keys",
    )


def window_size(config: Config) -> int | None:
    """Return the window that a config states, whichever layers have it."""
    fields = text_config(config)
    names = ("sliding_window", "window_size", "local_attention")
    return next((fields.count(name) for name in names if fields.get(name)), None)  # 0 is none


def find_window_field(config: Config) -> int | None:
    """Return the window of `window_size`, or else the first whole number that is named window."""
    named = (n for name, n in text_config(config).items() if "window" in name)
    return window_size(config) or next((n for n in named if isinstance(n, int) and n > 0), None)


def window_sides(config: Config, layer: int) -> tuple[int, int | None] | None:
    """Return the keys before and after a query that it may attend to; None without a window.

    Gemma 3 with ``use_bidirectional_attention`` sees half of ``sliding_window`` to each side: its
    class halves the number of the file. Errors are those of `attention_window`.
    """
    size, fields = attention_window(config, layer), text_config(config)
    if size is None:
        return None
    if fields.text("model_type") in _TWO_SIDED and fields.flag("use_bidirectional_attention"):
        return size // 2, size // 2
    return size - 1, None


def _layer_value(fields: ConfigFields, name: str, layer: int) -> Any:
    values = fields.layer_values(name)
    return values[layer] if layer < len(values) else None


def layout_name(config: Config) -> str | None:
    """Return the name of the layout of this model's files; None for an unknown model_type."""
    fields = ConfigFields.wrap(config)
    while (kind := fields.text("model_type")) not in _KNOWN and "text_config" in fields:
        section = fields.section("text_config")
        if section is None:
            break
        fields = section
    if kind == "falcon":
        if fields.flag("new_decoder_architecture"):
            return "falcon-40b"
        return "falcon-7b" if fields.flag("multi_query") else "falcon-rw"
    if kind == "gpt_bigcode":
        multi = fields.flag("multi_query", default=True)
        return "gpt-bigcode-mqa" if multi else "gpt-bigcode-mha"
    if kind == "cohere" and fields.flag("use_qk_norm"):
        return "cohere-qk-norm"
    if _LAYOUTS.get(kind or "") == "deepseek" and fields.get("q_lora_rank", 1) is None:
        return "deepseek-lite"
    return _LAYOUTS.get(kind or "")


def read_head_dim(fields: ConfigFields, counts: Sizes) -> int | None:
    if _has_two_heads(fields):
        return None
    embed_dim = _read_first_count(fields, ("hidden_size", "n_embd", "d_model", "dim", "emb_dim"))
    quotient = embed_dim // counts["heads"] if embed_dim and "heads" in counts else None
    return counts.get("head_dim", quotient)


_MAX_LAYERS = 8  # layers that an error lists
_EPS = ("rms_norm_eps", "layer_norm_eps", "layernorm_epsilon", "norm_eps")
_FACTORS = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "mup_scale_qk_dot_by_d": False,
}
_WIDTHS_WITH_LATENT = {
    "kv_lora_rank": "rank",
    "q_lora_rank": "query_dim",
    "qk_rope_head_dim": "shared_width",
    "v_head_dim": "value_dim",
}
# Fields of forms that no layer has, or that only some layouts have -> the part of the function.
_FORMS = {
    "relative_attention": "score_bias",
    "use_relative_position_bias": "score_bias",
    "use_shared_relative_position_bias": "score_bias",
    "use_relative_position_embeddings": "score_bias",
    "position_embeddings_type": "score_bias",
    "pos_att_type": "score_bias",
    "use_qk_norm": "qk_norm",
    "qk_layernorm": "qk_norm",
    "use_prompt": "prompts",
}


def find_config_contradiction(config: Config, function: AttentionSpec, sizes: Sizes) -> str | None:
    """Return the first field in which config and layout differ, with both values; None if none."""
    for name, value in _find_contradictions(text_config(config), function, sizes):
        is_argument = name == "rotary_width" and name not in read_stated_counts(config)
        origin = "the argument says" if is_argument else "the config says"
        return f"{name}: {function.words().get(name, 'none')}; {origin} {value}"
    return None


def _find_contradictions(
    fields: ConfigFields, function: AttentionSpec, sizes: Sizes
) -> Iterator[tuple[str, object]]:
    """Yield the fields of the layout that the config contradicts, with the value of the config."""
    kind, alibi = fields.text("position_embedding_type"), fields.flag("alibi")
    is_stated = fields.get("alibi") is not None
    is_alibi = isinstance(function.score_bias, spec.AlibiRule)
    if function.score_bias is not FROM_CONFIG and is_stated and is_alibi != alibi:
        yield "score_bias", f"alibi {alibi}"
    if function.score_bias is ABSENT and str(kind).startswith(("alibi", "relative_key")):
        yield "score_bias", f"position_embedding_type {kind}"
    rotates = function.rotation is not None
    if rotates and (kind in ("absolute", "alibi") or alibi):
        yield "rotary", f"position_embedding_type {kind}" if kind else f"alibi {alibi}"
    if function.rotary is ABSENT and kind in ("rotary", "rope"):
        yield "rotary", f"position_embedding_type {kind}"
    layers = fields.layer_values("no_rope_layers")
    if rotates and layers and not any(layers):
        text = layers if len(layers) <= _MAX_LAYERS else "0 for all layers"
        yield "rotary", f"no_rope_layers {text}"
    head_dim = sizes["head_dim"]
    usual = {"attention_multiplier": head_dim**-0.5, "query_pre_attn_scalar": head_dim}
    for name, factor in usual.items():
        value = fields.number(name)
        if function.scale is not FROM_CONFIG and value is not None and value != factor:
            yield "scale", f"{name} {fields[name]}"
    for name, plain in _FACTORS.items():
        flag = fields.flag(name, default=plain)
        if function.scale == USUAL_SCALE and flag is not plain:
            yield "scale", f"{name} {flag}"
    capped = fields.number("attn_logit_softcapping")
    is_capped = isinstance(function.softcap, spec.Softcap) and "attn_logit_softcapping" in fields
    if (function.softcap is ABSENT and capped) or (is_capped and not capped):
        yield "softcap", f"attn_logit_softcapping {capped}"
    for section in (fields, fields.section("attn_config") or ConfigFields({})):
        if section.number("clip_qkv") and function.clip is ABSENT:
            yield "clip", f"clip_qkv {section['clip_qkv']}"
        if section.number("softmax_scale") and function.scale is not FROM_CONFIG:
            yield "scale", f"softmax_scale {section['softmax_scale']}"
    is_bare = fields.text("model_type") in _NORM_WITH_ROTATION and not rotates
    for name, form in find_stated_forms(fields):
        if getattr(function, name, ABSENT) is ABSENT and not (name == "qk_norm" and is_bare):
            yield name, form
    for name, axis in _WIDTHS_WITH_LATENT.items() if function.compressed else ():
        if fields.count(name) not in (None, sizes.get(axis)):
            yield "latent", f"{name} {fields[name]}, where the tensors have {sizes.get(axis)}"
    width = sizes.get("rotary_width", head_dim)
    if function.rotation and not function.is_rotary_width_open and width != head_dim:
        yield "rotary_width", f"{width} of {head_dim}"


def find_stated_forms(config: Config) -> Iterator[tuple[str, str]]:
    """Yield parts of the function in a form of `_FORMS`, with the field that states it."""
    fields = text_config(config)
    for name, part in _FORMS.items():
        if (value := fields.get(name)) and value not in ("absolute", "rotary"):
            yield part, f"{name} {describe_value(value)}"


def layout_in_layer(layout: Layout, config: Config, number: int) -> Layout:
    """Return the layout of one layer: some models rotate in only some of their layers.

    Falcon has ALiBi where its config says so, in any of its layouts, and in no other.
    """
    rotates, function = layer_rotates(config, number), layout.function
    if text_config(config).text("model_type") == "falcon":
        if not layout.name.startswith("falcon"):
            return layout
        bias = ABSENT if rotates else spec.AlibiRule(before_scale=True)
        function = replace(function, rotary=FROM_CONFIG, score_bias=bias)
    if function.compressed and not text_config(config).flag("rope_interleave", default=True):
        layout = replace(layout, rows="half-split")
        function = layout.function
    if rotates is False:
        function = replace(function, rotary=ABSENT)
        if layout.name == "llama4":
            function = replace(function, qk_norm=ABSENT)
    elif rotates and function.rotary is FROM_CONFIG:
        function = replace(function, rotary=RotaryRule())
    if layout.name in _MAY_CLIP and text_config(config).get("clip_qkv"):
        function = replace(function, clip=FROM_CONFIG)
    return replace(layout, function=function)


def resolve(function: AttentionSpec, config: Config, *, layer: int) -> AttentionSpec:
    """Return a function with the numbers that its model's config states for one layer.

    A field that nothing in the config states stays FROM_CONFIG. See `layout_in_layer`.

    Raises:
        OptionError: a rotary scaling that `Rotary` does not have; or a window in layers unstated.
    """
    fields = text_config(config)
    stated: dict[str, Any] = {}
    if function.rotary:
        stated["rotary"] = _read_rotary(fields, layer, function.rotation or RotaryRule())
    if function.scale is FROM_CONFIG and fields:
        stated["scale"] = _read_scale(fields, layer)
    if function.softcap is not ABSENT:
        softcap = fields.number("attn_logit_softcapping")
        stated["softcap"] = spec.Softcap(softcap) if softcap else ABSENT
    if function.qk_norm is FROM_CONFIG and "qk_layernorm" in fields:
        stated["qk_norm"] = spec.NormRule("layer") if fields["qk_layernorm"] else ABSENT
    if isinstance(function.output_norm, spec.NormRule):
        stated["output_norm"] = replace(function.output_norm, eps=_read_eps(fields))
    if isinstance(function.values, spec.ValueRule):
        stated["values"] = _read_values(function.values, fields)
    if function.buckets and function.buckets.buckets is FROM_CONFIG:
        # MPNet's class counts 32 whatever its config says.
        is_fixed = fields.text("model_type") == "mpnet"
        stated["score_bias"] = spec.BucketRule(
            buckets=(not is_fixed and fields.count("relative_attention_num_buckets")) or 32,
            max_distance=fields.count("relative_attention_max_distance") or 128,
            bidirectional=not fields.flag("is_decoder"),
        )
    if function.score_bias is FROM_CONFIG and "relative_attention" in fields:
        stated["score_bias"] = read_places(fields, eps=_read_eps(fields, 1e-7))
    if function.differential is FROM_CONFIG and "model_type" in fields:
        stated["differential"] = read_pairs(fields, layer, eps=_read_eps(fields, 1e-5))
    if function.window is FROM_CONFIG:
        stated["window"] = window_sides(fields, layer) or ABSENT
    if function.temperature is FROM_CONFIG:
        stated["temperature"] = _read_temperature(fields, layer)
    if function.clip is FROM_CONFIG and fields:
        section = fields.section("attn_config") or fields
        stated["clip"] = section.number("clip_qkv") or ABSENT
    resolved = replace(function, **stated)
    resolved = replace(resolved, **_read_of_model_type(resolved, fields))
    if not isinstance(norm := resolved.qk_norm, spec.NormRule):
        return resolved
    usual = 1e-5 if norm.kind == "layer" else 1e-6  # those of the classes
    return replace(resolved, qk_norm=replace(norm, eps=_read_eps(fields, usual)))


def _read_eps(fields: ConfigFields, usual: float = 1e-6) -> float:
    epsilons = (fields.number(name) for name in _EPS)
    return next((number for number in epsilons if number is not None), usual)


def _read_values(rule: spec.ValueRule, fields: ConfigFields) -> spec.ValueRule | spec.Unset:
    """Return the change of values, absent where MiMo's config states no factor."""
    if rule.factor is not FROM_CONFIG:
        return replace(rule, eps=_read_eps(fields))
    stated = fields.number("attention_value_scale")
    return ABSENT if stated is None else replace(rule, factor=stated)


def _read_temperature(fields: ConfigFields, layer: int) -> spec.TemperatureRule | spec.Unset:
    """Return the temperature of Llama 4, in layers that do not rotate, or of Ministral 3."""
    rotary = rotary_section_of_layer(fields, layer)
    if beta := rotary.number("llama_4_scaling_beta"):
        length = rotary.required_number("original_max_position_embeddings")
        return spec.TemperatureRule(beta, length)
    if not fields.flag("attn_temperature_tuning") or layer_rotates(fields, layer) is not False:
        return ABSENT
    factor, length = map(fields.required_number, ("attn_scale", "floor_scale"))
    return spec.TemperatureRule(factor, length, first=1)


def _read_scale(fields: ConfigFields, layer: int) -> float | spec.ScaleRule:
    rotary, head_dim = rotary_section_of_layer(fields, layer), _read_counts(fields).get("head_dim")
    scaling, weight = rotary_scaling_kind(rotary), rotary.number("mscale_all_dim")
    if fields.get("kv_lora_rank") is not None and scaling and weight and head_dim:
        factor = rotary.required_number("factor")
        return float(head_dim**-0.5 * yarn_magnitude(factor, weight) ** 2)
    if (terms := read_place_terms(fields)) and (
        width := read_head_dim(fields, _read_counts(fields))
    ):
        return float(((1 + len(terms)) * width) ** -0.5)
    scalar = fields.number("query_pre_attn_scalar")
    if scalar is not None and scalar < 0:
        raise fields.field_error("query_pre_attn_scalar", "a positive number")
    if of_queries := fields.number("qk_scale_factor"):  # in Muse
        return of_queries * USUAL_SCALE.scale(int(fields.required_number("head_dim")))
    return float(scalar**-0.5) if scalar else fields.number("attention_multiplier") or USUAL_SCALE


def _read_of_model_type(function: AttentionSpec, fields: ConfigFields) -> dict[str, Any]:
    """Return the open fields that the layout of the config's model_type states.

    A score bias or a norm that a config may state (`_FORMS`) is absent where it does not.
    """
    if (name := layout_name(fields)) is None:
        return {}
    known = vars(registry.layout(name).function)
    stated = {n: known[n] for n, value in vars(function).items() if value is FROM_CONFIG}
    absent = {*_FORMS.values()} - {part for part, _ in find_stated_forms(fields)}
    return {n: x or ABSENT for n, x in stated.items() if x is not FROM_CONFIG or n in absent}


def _read_rotary(fields: ConfigFields, layer: int, rule: RotaryRule) -> RotaryRule:
    if (order := PLANES.get(fields.text("model_type") or "")) is not None:
        heads = read_stated_counts(fields)
        theta = rotary_section_of_layer(fields, layer).number("rope_theta")
        theta = theta or fields.required_number("rope_theta")
        plane = Rotary.of_plane(theta, read_head_dim(fields, heads) or 0, order=order)
        return replace(plane.rule, pairing=rule.pairing)
    if "patch_size" in fields:
        raise OptionError(
            saw=f"a rotation in {fields.origin}, and patch_size {fields['patch_size']}",
            needed="a rotation by the place of a token: images may rotate by row and by column",
            do="pass rotary=Rotary(...) if this model rotates by place; or use the model's class",
        )
    rotary = rotary_section_of_layer(fields, layer)
    if not rotary and fields.text("model_type") in SCALED:
        raise fields.field_error("rope_parameters", "a JSON object, which has the scaling")
    counts, scaling = read_stated_counts(fields), read_scaling(rotary, fields)
    theta = rotary.number("rope_theta") or next(filter(None, map(fields.number, _THETAS)), 10_000.0)
    exponent = _read_share_of_head(fields, counts, layer)
    whole = read_head_dim(fields, counts) if exponent is None else exponent + exponent % 2
    width = counts.get("rotary_width", whole)  # the last of an odd number turns in a pair too
    is_odd = width and exponent and width == exponent + 1 and scaling is None
    if isinstance(scaling, ProportionalScaling):
        width = read_head_dim(fields, counts)
    return replace(
        rule,
        theta=theta,
        width=width,
        scaling=scaling,
        exponent_width=exponent if is_odd else None,
        axes=read_axes(rotary, fields, width),
    )
