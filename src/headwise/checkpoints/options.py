"""Contradictions between a config.json and a layout, and the numbers that a layout leaves to it.

The names are those of transformers (modeling_rope_utils.py and the models' configurations).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from headwise.checkpoints.config import (
    Config,
    ConfigFields,
    attention_window,
    layer_rotates,
    layout_name,
    read_head_dim,
    read_layer_counts,
    read_stated_counts,
    rotary_section_of_layer,
    text_config,
)
from headwise.errors import OptionError
from headwise.function.scaling import LinearScaling, Llama3Scaling, Scaling, YarnScaling
from headwise.function.spec import (
    ABSENT,
    FROM_CONFIG,
    USUAL_SCALE,
    AlibiRule,
    AttentionSpec,
    BucketRule,
    NormRule,
    RotaryRule,
    ScaleRule,
    Softcap,
    Unset,
)
from headwise.layouts._layout import Layout
from headwise.layouts.modules import NamedModule
from headwise.layouts.sizes import Sizes
from headwise.support.text import describe_value

_MAX_LAYERS = 8  # layers that an error lists
_EPS = ("rms_norm_eps", "layer_norm_eps", "layernorm_epsilon", "norm_eps")
_FACTORS = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}


def find_config_contradiction(config: Config, function: AttentionSpec, sizes: Sizes) -> str | None:
    """Return the first field in which config and layout differ, with both values; None if none."""
    for name, value in _find_contradictions(text_config(config), function, sizes):
        is_argument = name == "rotary_width" and name not in read_stated_counts(config)
        origin = "the argument says" if is_argument else "the config says"
        return f"{name}: {function.words()[name]}; {origin} {value}"
    return None


def _find_contradictions(
    fields: ConfigFields, function: AttentionSpec, sizes: Sizes
) -> Iterator[tuple[str, object]]:
    """Yield the fields of the layout that the config contradicts, with the value of the config."""
    kind, alibi = fields.text("position_embedding_type"), fields.flag("alibi")
    is_alibi, is_stated = (
        isinstance(function.score_bias, AlibiRule),
        fields.get("alibi") is not None,
    )
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
    is_capped = isinstance(function.softcap, Softcap) and "attn_logit_softcapping" in fields
    if (function.softcap is ABSENT and capped) or (is_capped and not capped):
        yield "softcap", f"attn_logit_softcapping {capped}"
    for section in (fields, fields.section("attn_config") or ConfigFields({})):
        if section.number("clip_qkv") and function.clip is ABSENT:
            yield "clip", f"clip_qkv {section['clip_qkv']}"
    width = sizes.get("rotary_width", head_dim)
    if function.rotation and not function.is_rotary_width_open and width != head_dim:
        yield "rotary_width", f"{width} of {head_dim}"


def find_missing_layers(
    config: Config, modules: Iterable[NamedModule], names: Iterable[str]
) -> list[str]:
    """Return sentences on layers that the config counts and of which there is no tensor.

    A layer that holds other tensors may have no attention, as in hybrid models. Of the stacks of
    one role, such as those of an image and a text tower, only the longest is compared; modules at
    other places than the layout's may be of a part with layers of its own number. A model_type that
    the catalogue does not know may count others.
    """
    if config.get("model_type") and layout_name(config) is None:
        return []
    stacks: dict[str, dict[str, set[int]]] = {}
    for module in modules:
        if module.stack is not None and module.place.role != "cross":
            by_stack = stacks.setdefault(module.place.role, {})
            by_stack.setdefault(module.stack, set()).add(module.layer)
    sentences, names = [], list(names)
    for role, by_stack in stacks.items():
        stack, present = max(by_stack.items(), key=lambda pair: len(pair[1]))
        # A config of several models has several counts: the next one up is that of this stack.
        count = min((n for n in read_layer_counts(config, role) if n >= len(present)), default=0)
        missing = [
            f"{stack}{number}"
            for number in sorted({*range(count)} - present)
            if not any(
                name.startswith((f"{stack}{number}.", f"{stack}{number}/")) for name in names
            )
        ]
        if missing:
            more = f" and {len(missing) - 1} more layers are" if len(missing) > 1 else " is"
            sentences.append(f"`{missing[0]}`{more} missing: the config says {count} layers")
    return sentences


def layout_in_layer(layout: Layout, config: Config, number: int) -> Layout:
    """Return the layout of one layer: some models rotate in only some of their layers."""
    rotates, rotary = layer_rotates(config, number), layout.function.rotary
    if rotates is False:
        rotary = ABSENT
    elif rotates and rotary is FROM_CONFIG:
        rotary = RotaryRule()
    return replace(layout, function=replace(layout.function, rotary=rotary))


def resolve(function: AttentionSpec, config: Config, *, layer: int) -> AttentionSpec:
    """Return a function with the numbers that its model's config states for one layer.

    No field is FROM_CONFIG then, but for the scale where there is no config.

    Args:
        function: the function of the stored layout, in that layer; see `layout_in_layer`.
        config: the fields of config.json.
        layer: the number of the layer, from 0.

    Raises:
        OptionError: a rotary scaling that `Rotary` does not have; or a window, of which the config
            does not say in which layers it is.
    """
    fields = text_config(config)
    stated: dict[str, Any] = {}
    if function.rotary:
        stated["rotary"] = _read_rotary(fields, layer, function.rotation or RotaryRule())
    if function.scale is FROM_CONFIG:
        stated["scale"] = _read_scale(fields)
    if function.softcap is not ABSENT:
        softcap = fields.number("attn_logit_softcapping")
        stated["softcap"] = Softcap(softcap) if softcap else ABSENT
    if isinstance(function.qk_norm, NormRule):
        epsilons = (fields.number(name) for name in _EPS)
        eps = next((number for number in epsilons if number is not None), 1e-6)
        stated["qk_norm"] = replace(function.qk_norm, eps=eps)
    if isinstance(function.score_bias, BucketRule):
        stated["score_bias"] = BucketRule(
            buckets=fields.count("relative_attention_num_buckets") or 32,
            max_distance=fields.count("relative_attention_max_distance") or 128,
            bidirectional=not fields.flag("is_decoder"),
        )
    if function.window is FROM_CONFIG:
        window = attention_window(fields, layer)
        stated["window"] = ABSENT if window is None else (window - 1, None)
    left = {name: ABSENT for name, value in vars(function).items() if value is FROM_CONFIG}
    return replace(function, **{**left, **stated})


def _read_rotary(fields: ConfigFields, layer: int, rule: RotaryRule) -> RotaryRule:
    rotary = rotary_section_of_layer(fields, layer)
    theta = rotary.number("rope_theta") or fields.number("rope_theta")
    counts = read_stated_counts(fields)
    return replace(
        rule,
        theta=theta or fields.number("rotary_emb_base") or 10_000.0,
        width=counts.get("rotary_width", read_head_dim(fields, counts)),
        scaling=_read_rotary_scaling(rotary, fields),
    )


def _read_rotary_scaling(rotary: ConfigFields, fields: ConfigFields) -> Scaling | None:
    kind = rotary.text("rope_type" if "rope_type" in rotary else "type") or "default"
    if kind == "default":
        return None
    if kind not in _SCALINGS:
        raise OptionError(
            saw=f"the rotary scaling {describe_value(kind)} in the config",
            needed=f"default, {', '.join(_SCALINGS)}",
            do="pass rotary=Rotary(...) with the same frequencies",
        )
    return _SCALINGS[kind](rotary, fields)


def _read_original_length(rotary: ConfigFields, fields: ConfigFields) -> int:
    name = "max_position_embeddings"
    count = rotary.count(f"original_{name}") or fields.count(name)
    return count or int(fields.required_number(name))


_SCALINGS: dict[str, Callable[[ConfigFields, ConfigFields], Scaling]] = {
    "linear": lambda rotary, _: LinearScaling(rotary.required_number("factor")),
    "llama3": lambda rotary, fields: Llama3Scaling(
        factor=rotary.required_number("factor"),
        low_freq_factor=rotary.required_number("low_freq_factor"),
        high_freq_factor=rotary.required_number("high_freq_factor"),
        original_length=_read_original_length(rotary, fields),
    ),
    "yarn": lambda rotary, fields: YarnScaling(
        factor=rotary.required_number("factor"),
        original_length=_read_original_length(rotary, fields),
        beta_fast=rotary.number("beta_fast") or 32.0,
        beta_slow=rotary.number("beta_slow") or 1.0,
        attention_factor=rotary.number("attention_factor"),
        mscale=rotary.number("mscale"),
        mscale_all_dim=rotary.number("mscale_all_dim"),
        truncate=rotary.flag("truncate", default=True),
    ),
}


def _read_scale(fields: ConfigFields) -> float | ScaleRule | Unset:
    """Return the scale of the config; the usual scale if the config states none."""
    if (scalar := fields.positive("query_pre_attn_scalar")) is not None:
        return float(scalar**-0.5)
    usual = USUAL_SCALE if fields else FROM_CONFIG
    return fields.number("attention_multiplier") or usual
