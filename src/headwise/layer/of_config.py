"""The options of a layer that a model's config.json says: rotation, scale, softcap, norm, window.

The names are those of transformers (modeling_rope_utils.py and the models' configurations).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headwise.errors import OptionError
from headwise.layouts.config import Config, counts_of, head_dim_of, rotation_of, text_of, turns
from headwise.layouts.function import Function
from headwise.layouts.layout import Layout
from headwise.positions import (
    LinearScaling,
    Llama3Scaling,
    Rotary,
    Scaling,
    T5Bias,
    YarnScaling,
)
from headwise.qk_norm import QKNorm

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
    config = text_of(config)
    found: dict[str, Any] = {}
    if function.rotary not in (None, "none"):
        found["rotary"] = _rotary(config, layer)
    if function.scale is None:
        found |= _scale(config)
    if function.softcap != "none" and config.get("attn_logit_softcapping"):
        found["softcap"] = float(config["attn_logit_softcapping"])
    if function.qk_norm not in (None, "none"):
        found["qk_norm"] = _norm(config, function.qk_norm)
    if function.score_bias == "t5":
        found["score_bias"] = T5Bias(
            buckets=config.get("relative_attention_num_buckets", 32),
            max_distance=config.get("relative_attention_max_distance", 128),
            bidirectional=not config.get("is_decoder", False),
        )
    return found


def _rotary(config: Config, layer: int) -> Rotary:
    said = rotation_of(config, layer)
    theta = said.get("rope_theta") or config.get("rope_theta") or config.get("rotary_emb_base")
    return Rotary(
        theta=float(theta or 10_000.0),
        width=counts_of(config).get("rotary_width", head_dim_of(config)),
        scaling=_scaling(said, config),
    )


def _scaling(said: Config, config: Config) -> Scaling | None:
    kind = said.get("rope_type", said.get("type", "default"))
    if kind == "default":
        return None
    if kind not in _SCALINGS:
        raise OptionError(
            saw=f"a rotation scaled by {kind!r} in the config",
            needed=f"default, {', '.join(_SCALINGS)}",
            do="give rotary=Rotary(...) in the call, with frequencies that are the same here",
        )
    return _SCALINGS[kind](said, config)


def _original(said: Config, config: Config) -> int:
    return int(said.get("original_max_position_embeddings") or config["max_position_embeddings"])


_SCALINGS: dict[str, Callable[[Config, Config], Scaling]] = {
    "linear": lambda said, _: LinearScaling(float(said["factor"])),
    "llama3": lambda said, config: Llama3Scaling(
        factor=float(said["factor"]),
        low_freq_factor=float(said["low_freq_factor"]),
        high_freq_factor=float(said["high_freq_factor"]),
        original_length=_original(said, config),
    ),
    "yarn": lambda said, config: YarnScaling(
        factor=float(said["factor"]),
        original_length=_original(said, config),
        beta_fast=float(said.get("beta_fast") or 32.0),
        beta_slow=float(said.get("beta_slow") or 1.0),
        attention_factor=said.get("attention_factor"),
        mscale=said.get("mscale"),
        mscale_all_dim=said.get("mscale_all_dim"),
        truncate=said.get("truncate", True),
    ),
}


def _scale(config: Config) -> dict[str, float | None]:
    """A factor that the config says; where it is a config and says none, the usual one."""
    if config.get("query_pre_attn_scalar"):
        return {"scale": float(config["query_pre_attn_scalar"]) ** -0.5}
    if config.get("attention_multiplier"):
        return {"scale": float(config["attention_multiplier"])}
    return {"scale": None} if config else {}


def _norm(config: Config, said: str) -> QKNorm:
    """From words such as "rms over head, before rotary, weight + 1"."""
    eps = next((float(config[name]) for name in _EPS if name in config), 1e-6)
    return QKNorm(
        kind="layer" if said.startswith("layer") else "rms",
        over="width" if "over width" in said else "head",
        place="after" if "after rotary" in said else "before",
        one_plus="weight + 1" in said,
        eps=eps,
    )
