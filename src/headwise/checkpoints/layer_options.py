"""The options of a layer that a model's config.json says: rotation, scale, softcap, norm, window.

The names are those of transformers (modeling_rope_utils.py and the models' configurations).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headwise.checkpoints.config import (
    Config,
    Fields,
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
from headwise.layouts.function import Function
from headwise.layouts.layout import Layout
from headwise.support.axes import describe_value

_EPS = ("rms_norm_eps", "layer_norm_eps", "layernorm_epsilon", "norm_eps")


def in_layer(layout: Layout, config: Config, number: int) -> Layout:
    """The layout as one layer has it: some models rotate in some of their layers only."""
    said, rotary = turns(config, number), layout.function.rotary
    if said is False:
        rotary = "none"
    elif said and rotary is None:
        rotary = "half-split"
    return replace(layout, function=replace(layout.function, rotary=rotary))


def options_of(config: Config, function: Function, *, layer: int) -> dict[str, Any]:
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
        found["qk_norm"] = _norm(fields, function.qk_norm)
    if function.score_bias == "t5":
        found["score_bias"] = T5Bias(
            buckets=fields.count("relative_attention_num_buckets") or 32,
            max_distance=fields.count("relative_attention_max_distance") or 128,
            bidirectional=not fields.flag("is_decoder"),
        )
    return found


def _rotary(fields: Fields, layer: int) -> Rotary:
    said = rotation_of(fields, layer)
    theta = said.number("rope_theta") or fields.number("rope_theta")
    return Rotary(
        theta=theta or fields.number("rotary_emb_base") or 10_000.0,
        width=counts_of(fields).get("rotary_width", head_dim_of(fields)),
        scaling=_scaling(said, fields),
    )


def _scaling(said: Fields, fields: Fields) -> Scaling | None:
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


def _original(said: Fields, fields: Fields) -> int:
    name = "max_position_embeddings"
    return said.count(f"original_{name}") or fields.count(name) or int(fields.needed(name))


_SCALINGS: dict[str, Callable[[Fields, Fields], Scaling]] = {
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


def _scale(fields: Fields) -> dict[str, float | None]:
    """A factor that the config says; where it is a config and says none, the usual one."""
    if (scalar := fields.positive("query_pre_attn_scalar")) is not None:
        return {"scale": scalar**-0.5}
    if multiplier := fields.number("attention_multiplier"):
        return {"scale": multiplier}
    return {"scale": None} if fields else {}


def _norm(fields: Fields, said: str) -> QKNorm:
    """From words such as "rms over head, weight + 1, before rotary"."""
    epsilons = (fields.number(name) for name in _EPS)
    eps = next((number for number in epsilons if number is not None), 1e-6)
    return QKNorm(
        kind="layer" if said.startswith("layer") else "rms",
        over="width" if "over width" in said else "head",
        place="after" if "after rotary" in said else "before",
        one_plus="weight + 1" in said,
        eps=eps,
    )
