"""What a model's config.json says against a layout: the same names are used for other functions."""

from __future__ import annotations

from collections.abc import Iterator

from headwise.checkpoints.config import Config, Fields, counts_of, text_of
from headwise.layouts.function import PAIRINGS, Function
from headwise.layouts.sizes import Sizes

_SCALES = ("attention_multiplier", "query_pre_attn_scalar")
_LISTED = 8  # layers in an error
_FACTORS = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}


def objection(config: Config, function: Function, sizes: Sizes) -> str | None:
    """The first thing that is not so; None where the config does not object.

    Args:
        config: as in config.json; the names are those of transformers.
        function: of a layout that names and shapes allow.
        sizes: of a module in that layout.
    """
    fields = text_of(config)
    for found in (_positions, _scale, _scores, _width):
        for name, said in found(fields, function, sizes):
            is_given = name == "rotary_width" and name not in counts_of(config)
            by = "the given one is" if is_given else "the config says"
            return f"{name}: {getattr(function, name)}; {by} {said}"
    return None


Found = Iterator[tuple[str, str]]


def _positions(fields: Fields, function: Function, _: Sizes) -> Found:
    kind, alibi = fields.text("position_embedding_type"), fields.flag("alibi")
    has_alibi = str(function.score_bias).startswith("alibi")
    if function.score_bias is not None and fields.get("alibi") is not None and has_alibi != alibi:
        yield "score_bias", f"alibi {alibi}"
    if function.score_bias == "none" and str(kind).startswith(("alibi", "relative_key")):
        yield "score_bias", f"position_embedding_type {kind}"
    if function.rotary in PAIRINGS and (kind in ("absolute", "alibi") or alibi):
        yield "rotary", f"position_embedding_type {kind}" if kind else f"alibi {alibi}"
    if function.rotary == "none" and kind in ("rotary", "rope"):
        yield "rotary", f"position_embedding_type {kind}"
    layers = fields.items_of("no_rope_layers")
    if function.rotary in PAIRINGS and layers and not any(layers):
        yield "rotary", f"no_rope_layers {layers if len(layers) <= _LISTED else '0 for all layers'}"


def _scale(fields: Fields, function: Function, sizes: Sizes) -> Found:
    head_dim = sizes["head_dim"]
    usual = {"attention_multiplier": head_dim**-0.5, "query_pre_attn_scalar": head_dim}
    for name in _SCALES:
        said = fields.number(name)
        if function.scale is not None and said is not None and said != usual[name]:
            yield "scale", f"{name} {fields[name]}"
    for name, plain in _FACTORS.items():
        said = fields.flag(name, default=plain)
        if function.scale == "1/sqrt(head_dim)" and said is not plain:
            yield "scale", f"{name} {said}"


def _scores(fields: Fields, function: Function, _: Sizes) -> Found:
    capped, clipped = fields.number("attn_logit_softcapping"), _clip(fields)
    if function.softcap == "none" and capped:
        yield "softcap", f"attn_logit_softcapping {capped}"
    if function.softcap == "tanh" and "attn_logit_softcapping" in fields and not capped:
        yield "softcap", f"attn_logit_softcapping {capped}"
    if function.clip == "none" and clipped:
        yield "clip", f"clip_qkv {clipped['clip_qkv']}"


def _clip(fields: Fields) -> Fields | None:
    """The object that clips, if one does."""
    inner = fields.inner("attn_config") or Fields({})
    return next((one for one in (fields, inner) if one.number("clip_qkv")), None)


def _width(_: Fields, function: Function, sizes: Sizes) -> Found:
    width = sizes.get("rotary_width")
    whole = function.rotary in PAIRINGS and function.rotary_width == "head_dim"
    if whole and width is not None and width != sizes["head_dim"]:
        yield "rotary_width", f"{width} of {sizes['head_dim']}"
