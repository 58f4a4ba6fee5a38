"""Checks of a layer's options; errors show the values that contradict each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headwise.errors import OptionError
from headwise.function.rotary import Rotary
from headwise.layers.checks import refuse_in_cross_attention
from headwise.layers.distance import PositionBias
from headwise.layers.norm import QKNorm
from headwise.masks.clauses.band import Band
from headwise.masks.mask import Mask
from headwise.matrix.checks import check_probability, check_scale_and_softcap
from headwise.support.text import describe_value, nearest_counts

if TYPE_CHECKING:
    from headwise.layers.attention import Attention


def default_head_dim(embed_dim: int, num_heads: int) -> int:
    """Return embed_dim / num_heads, or raise OptionError if it is no whole number."""
    if num_heads < 1 or embed_dim % num_heads:
        near = nearest_counts(num_heads, lambda n: embed_dim % n == 0, most=embed_dim)
        raise OptionError(
            saw=f"embed_dim={embed_dim}, num_heads={num_heads} and no head_dim",
            needed="embed_dim divisible by num_heads, or an explicit head_dim",
            do=f"num_heads={near}, or head_dim={max(1, embed_dim // max(1, num_heads))}",
        )
    return embed_dim // num_heads


def check_positive_whole_numbers(**counts: int) -> None:
    """Raise OptionError unless every count is a whole number from 1."""
    for name, count in counts.items():
        if not isinstance(count, (int, torch.SymInt)) or count < 1:
            raise OptionError(
                saw=f"{name}={describe_value(count)}",
                needed="a whole number from 1",
                do=f"set {name}",
            )


def check_options(
    layer: Attention,
    score_bias: PositionBias | None,
    *,
    crosses: bool,
    dtype: torch.dtype | None,
) -> None:
    """Raise OptionError if sizes or options contradict each other."""
    counts = ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "value_dim", "out_dim")
    check_positive_whole_numbers(**{name: getattr(layer, name) for name in (*counts, "source_dim")})
    if layer.num_heads % layer.num_kv_heads:
        raise OptionError(
            saw=f"num_heads={layer.num_heads} and num_kv_heads={layer.num_kv_heads}",
            needed="num_heads divisible by num_kv_heads: each kv head serves a group of heads",
            do=f"num_kv_heads={_divisors_in_words(layer.num_heads)}",
        )
    _check_option_types(layer, score_bias)
    positional = {"rotary": layer.rotary, "window": layer.window, "score_bias": score_bias}
    for name, option in positional.items():
        if crosses and option is not None:
            refuse_in_cross_attention(name, option, f"source_dim={layer.source_dim}")
    if layer.rotary is not None:
        layer.rotary.rotated_width(layer.head_dim)
    check_scale_and_softcap(layer.scale, layer.softcap, dtype=dtype or torch.get_default_dtype())
    check_probability(layer.dropout)


def _check_option_types(layer: Attention, score_bias: object) -> None:
    kinds = (
        ("rotary", layer.rotary, Rotary, "a Rotary", "rotary=Rotary()"),
        ("qk_norm", layer.qk_norm, QKNorm, "a QKNorm", "qk_norm=QKNorm()"),
        (
            "score_bias",
            score_bias,
            PositionBias,
            "an Alibi or a T5Bias; a ScoreBias is an argument of the call",
            "score_bias=Alibi()",
        ),
    )
    for name, option, kind, needed, do in kinds:
        if option is not None and (isinstance(option, type) or not isinstance(option, kind)):
            raise OptionError(saw=f"{name}={describe_value(option)}", needed=needed, do=do)
    window = layer.window
    if window is not None and (not isinstance(window, tuple) or len(window) != 2):
        raise OptionError(
            saw=f"window={describe_value(window)}",
            needed="(left, right): the number of keys before and after a query's position",
            do="window=(W - 1, 0) for a causal window of W keys, the query's own key included",
        )
    if window is not None:
        (band,) = Mask.window(*window).clauses_of_kind(
            Band
        )  # refuses a side that is no number from 0
        layer.window = band.sides  # Python integers: those of NumPy may wrap


def _divisors_in_words(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def describe_options(layer: Attention) -> str:
    """Return the sizes and the options that differ from their defaults, modules left out."""
    parts = [f"{layer.embed_dim} to {layer.num_heads} heads of {layer.head_dim}"]
    if layer.part is not None:
        parts.append(f"{layer.part} here")
    if layer.num_kv_heads != layer.num_heads:
        parts.append(f"{layer.num_kv_heads} kv_heads")
    if layer.value_dim != layer.head_dim:
        parts.append(f"value_dim={layer.value_dim}")
    if layer.source_dim != layer.embed_dim:
        parts.append(f"source_dim={layer.source_dim}")
    for name in ("rotary", "window", "scale", "softcap"):
        if getattr(layer, name) is not None:
            parts.append(f"{name}={getattr(layer, name)}")
    if layer.sink is not None:
        parts.append("sink")
    if layer.dropout:
        parts.append(f"dropout={layer.dropout}")
    return ", ".join(parts)
