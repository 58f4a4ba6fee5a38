"""What a model's config.json says against a layout: the same names are used for other functions."""

from __future__ import annotations

from collections.abc import Iterator

from headwise.layouts.config import Config, text_of, turns
from headwise.layouts.function import PAIRINGS, Function
from headwise.layouts.sizes import Sizes

_SCALES = ("attention_multiplier", "query_pre_attn_scalar")
_FACTORS = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}


def objection(config: Config, function: Function, sizes: Sizes) -> str | None:
    """The first thing that is not so; None where the config does not object.

    Args:
        config: as in config.json; the names are those of transformers.
        function: of a layout that names and shapes allow.
        sizes: of a module in that layout.
    """
    config = text_of(config)
    for found in (_positions, _scale, _scores, _width):
        for name, said in found(config, function, sizes):
            return f"{name}: {getattr(function, name)}; the config says {said}"
    return None


Found = Iterator[tuple[str, str]]


def _positions(config: Config, function: Function, _: Sizes) -> Found:
    kind, alibi = config.get("position_embedding_type"), config.get("alibi")
    has_alibi = str(function.score_bias).startswith("alibi")
    if function.score_bias is not None and alibi is not None and has_alibi != bool(alibi):
        yield "score_bias", f"alibi {alibi}"
    if function.score_bias == "none" and str(kind).startswith(("alibi", "relative_key")):
        yield "score_bias", f"position_embedding_type {kind}"
    if function.rotary in PAIRINGS and (kind in ("absolute", "alibi") or alibi):
        yield "rotary", f"position_embedding_type {kind}" if kind else f"alibi {alibi}"
    if function.rotary == "none" and kind in ("rotary", "rope"):
        yield "rotary", f"position_embedding_type {kind}"
    if function.rotary in PAIRINGS and config.get("no_rope_layers") and not _any_turns(config):
        yield "rotary", f"no_rope_layers {config['no_rope_layers']}"


def _any_turns(config: Config) -> bool:
    return any(turns(config, layer) for layer in range(len(config["no_rope_layers"])))


def _scale(config: Config, function: Function, sizes: Sizes) -> Found:
    head_dim = sizes["head_dim"]
    usual = {"attention_multiplier": head_dim**-0.5, "query_pre_attn_scalar": head_dim}
    for name in _SCALES:
        said = config.get(name)
        if function.scale is not None and said is not None and float(said) != usual[name]:
            yield "scale", f"{name} {said}"
    for name, plain in _FACTORS.items():
        if function.scale == "1/sqrt(head_dim)" and config.get(name, plain) is not plain:
            yield "scale", f"{name} {config[name]}"


def _scores(config: Config, function: Function, _: Sizes) -> Found:
    capped, clipped = config.get("attn_logit_softcapping"), _clip(config)
    if function.softcap == "none" and capped:
        yield "softcap", f"attn_logit_softcapping {capped}"
    if function.softcap == "tanh" and "attn_logit_softcapping" in config and not capped:
        yield "softcap", f"attn_logit_softcapping {capped}"
    if function.clip == "none" and clipped:
        yield "clip", f"clip_qkv {clipped}"


def _clip(config: Config) -> object:
    inner = config.get("attn_config")
    return config.get("clip_qkv") or (inner.get("clip_qkv") if isinstance(inner, dict) else None)


def _width(_: Config, function: Function, sizes: Sizes) -> Found:
    width = sizes.get("rotary_width")
    whole = function.rotary in PAIRINGS and function.rotary_width == "head_dim"
    if whole and width is not None and width != sizes["head_dim"]:
        yield "rotary_width", f"{width} of {sizes['head_dim']}"
