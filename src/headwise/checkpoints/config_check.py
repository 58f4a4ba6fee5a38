"""Contradictions between a config.json and a layout, and the layer options in a config.json.

The names are those of transformers (modeling_rope_utils.py and the models' configurations).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from headwise.checkpoints.config import (
    Config,
    ConfigFields,
    counts_of,
    head_dim_of,
    rotation_of,
    text_of,
    turns,
)
from headwise.errors import OptionError
from headwise.layers.native.qk_norm import QKNorm
from headwise.layers.positions import (
    LinearScaling,
    Llama3Scaling,
    Rotary,
    Scaling,
    T5Bias,
    YarnScaling,
)
from headwise.layouts.attention_spec import PAIRINGS, USUAL_SCALE, AttentionSpec
from headwise.layouts.axis_sizes import Sizes
from headwise.layouts.layout import Layout
from headwise.support.axes import describe_value

_LISTED = 8  # layers in an error
_FACTORS = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}


def objection(config: Config, function: AttentionSpec, sizes: Sizes) -> str | None:
    """The first thing that is not so; None where the config does not object."""
    for name, said in _objections(text_of(config), function, sizes):
        is_given = name == "rotary_width" and name not in counts_of(config)
        by = "the given one is" if is_given else "the config says"
        return f"{name}: {getattr(function, name)}; {by} {said}"
    return None


def _objections(
    fields: ConfigFields, function: AttentionSpec, sizes: Sizes
) -> Iterator[tuple[str, object]]:
    """A field of the function, and what the config says in its place."""
    kind, alibi = fields.text("position_embedding_type"), fields.flag("alibi")
    has_alibi = str(function.score_bias).startswith("alibi")
    if function.score_bias is not None and fields.get("alibi") is not None and has_alibi != alibi:
        yield "score_bias", f"alibi {alibi}"
    if function.score_bias == "none" and str(kind).startswith(("alibi", "relative_key")):
        yield "score_bias", f"position_embedding_type {kind}"
    rotates = function.rotary in PAIRINGS
    if rotates and (kind in ("absolute", "alibi") or alibi):
        yield "rotary", f"position_embedding_type {kind}" if kind else f"alibi {alibi}"
    if function.rotary == "none" and kind in ("rotary", "rope"):
        yield "rotary", f"position_embedding_type {kind}"
    layers = fields.items_of("no_rope_layers")
    if rotates and layers and not any(layers):
        yield "rotary", f"no_rope_layers {layers if len(layers) <= _LISTED else '0 for all layers'}"
    head_dim = sizes["head_dim"]
    usual = {"attention_multiplier": head_dim**-0.5, "query_pre_attn_scalar": head_dim}
    for name, factor in usual.items():
        said = fields.number(name)
        if function.scale is not None and said is not None and said != factor:
            yield "scale", f"{name} {fields[name]}"
    for name, plain in _FACTORS.items():
        flag = fields.flag(name, default=plain)
        if function.scale == USUAL_SCALE and flag is not plain:
            yield "scale", f"{name} {flag}"
    capped = fields.number("attn_logit_softcapping")
    is_capped = function.softcap == "tanh" and "attn_logit_softcapping" in fields
    if (function.softcap == "none" and capped) or (is_capped and not capped):
        yield "softcap", f"attn_logit_softcapping {capped}"
    for one in (fields, fields.inner("attn_config") or ConfigFields({})):
        if one.number("clip_qkv") and function.clip == "none":
            yield "clip", f"clip_qkv {one['clip_qkv']}"
    width = sizes.get("rotary_width", head_dim)
    if rotates and function.rotary_width == "head_dim" and width != head_dim:
        yield "rotary_width", f"{width} of {head_dim}"


_EPS = ("rms_norm_eps", "layer_norm_eps", "layernorm_epsilon", "norm_eps")


def in_layer(layout: Layout, config: Config, number: int) -> Layout:
    """The layout as one layer has it: some models rotate in some of their layers only."""
    said, rotary = turns(config, number), layout.function.rotary
    if said is False:
        rotary = "none"
    elif said and rotary is None:
        rotary = "half-split"
    return replace(layout, function=replace(layout.function, rotary=rotary))


def options_of(config: Config, function: AttentionSpec, *, layer: int) -> dict[str, Any]:
    """The options of `Attention.from_layout` that the layout leaves to the config.

    Args:
        config: as in config.json.
        function: of the layout that the weights are in, as that layer has it.
        layer: which one, from 0.

    Raises:
        OptionError: a scaling of the rotation that there is no counterpart for.
    """
    fields = text_of(config)
    found: dict[str, Any] = {}
    if function.rotary not in (None, "none"):
        found["rotary"] = _rotary(fields, layer)
    if function.scale is None:
        found |= _scale(fields)
    softcap = fields.number("attn_logit_softcapping")
    if function.softcap != "none" and softcap:
        found["softcap"] = softcap
    if function.qk_norm not in (None, "none"):
        # from words such as "rms over head, weight + 1, before rotary"
        said, epsilons = function.qk_norm, (fields.number(name) for name in _EPS)
        found["qk_norm"] = QKNorm(
            kind="layer" if said.startswith("layer") else "rms",
            over="width" if "over width" in said else "head",
            place="after" if "after rotary" in said else "before",
            one_plus="weight + 1" in said,
            eps=next((number for number in epsilons if number is not None), 1e-6),
        )
    if function.score_bias == "t5":
        found["score_bias"] = T5Bias(
            buckets=fields.count("relative_attention_num_buckets") or 32,
            max_distance=fields.count("relative_attention_max_distance") or 128,
            bidirectional=not fields.flag("is_decoder"),
        )
    return found


def _rotary(fields: ConfigFields, layer: int) -> Rotary:
    said = rotation_of(fields, layer)
    theta = said.number("rope_theta") or fields.number("rope_theta")
    counts = counts_of(fields)
    return Rotary(
        theta=theta or fields.number("rotary_emb_base") or 10_000.0,
        width=counts.get("rotary_width", head_dim_of(fields, counts)),
        scaling=_scaling(said, fields),
    )


def _scaling(said: ConfigFields, fields: ConfigFields) -> Scaling | None:
    kind = said.text("rope_type" if "rope_type" in said else "type") or "default"
    if kind == "default":
        return None
    if kind not in _SCALINGS:
        raise OptionError(
            saw=f"a rotation scaled by {describe_value(kind)} in the config",
            needed=f"default, {', '.join(_SCALINGS)}",
            do="give rotary=Rotary(...) in the call, with frequencies that are the same here",
        )
    return _SCALINGS[kind](said, fields)


def _original(said: ConfigFields, fields: ConfigFields) -> int:
    name = "max_position_embeddings"
    return said.count(f"original_{name}") or fields.count(name) or int(fields.needed(name))


_SCALINGS: dict[str, Callable[[ConfigFields, ConfigFields], Scaling]] = {
    "linear": lambda said, _: LinearScaling(said.needed("factor")),
    "llama3": lambda said, fields: Llama3Scaling(
        factor=said.needed("factor"),
        low_freq_factor=said.needed("low_freq_factor"),
        high_freq_factor=said.needed("high_freq_factor"),
        original_length=_original(said, fields),
    ),
    "yarn": lambda said, fields: YarnScaling(
        factor=said.needed("factor"),
        original_length=_original(said, fields),
        beta_fast=said.number("beta_fast") or 32.0,
        beta_slow=said.number("beta_slow") or 1.0,
        attention_factor=said.number("attention_factor"),
        mscale=said.number("mscale"),
        mscale_all_dim=said.number("mscale_all_dim"),
        truncate=said.flag("truncate", default=True),
    ),
}


def _scale(fields: ConfigFields) -> dict[str, float | None]:
    """A factor that the config says; where it is a config and says none, the usual one."""
    if (scalar := fields.positive("query_pre_attn_scalar")) is not None:
        return {"scale": scalar**-0.5}
    if multiplier := fields.number("attention_multiplier"):
        return {"scale": multiplier}
    return {"scale": None} if fields else {}
