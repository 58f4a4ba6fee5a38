"""What contradicts itself in a layer's options, or in a call: refused, with both values."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from headwise.errors import DeviceError, DTypeError, OptionError, ShapeError
from headwise.layers.native.cache import Cache
from headwise.layers.native.frames import Call
from headwise.layers.native.parts import Parts
from headwise.layers.native.qk_norm import QKNorm
from headwise.layers.positions import PositionBias, Rotary
from headwise.masks.checks import check_probability, check_score_numbers
from headwise.masks.mask import Mask
from headwise.support.axes import describe_value, sizes

X_AXES = ("batch", "queries", "embed_dim")
SOURCE_AXES = ("batch", "keys", "source_dim")


# ---- of a layer --------------------------------------------------------------------------------


def divided(embed_dim: int, num_heads: int) -> int:
    """The head_dim where none is given."""
    if num_heads < 1 or embed_dim % num_heads:
        raise OptionError(
            saw=f"embed_dim={embed_dim}, num_heads={num_heads} and no head_dim",
            needed="embed_dim divisible by num_heads, or a head_dim of its own",
            do=f"e.g. head_dim={max(1, embed_dim // max(1, num_heads))}",
        )
    return embed_dim // num_heads


def check_counts(**counts: int) -> None:
    """Raise OptionError where a size or a number is no whole number from 1."""
    for name, count in counts.items():
        if not isinstance(count, (int, torch.SymInt)) or count < 1:
            raise OptionError(
                saw=f"{name}={describe_value(count)}",
                needed="a whole number from 1",
                do=f"set {name}",
            )


def check(
    layer: Parts, score_bias: PositionBias | None, *, crosses: bool, dtype: torch.dtype | None
) -> None:
    """Raise OptionError where sizes or options contradict each other."""
    counts = ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "value_dim", "out_dim")
    check_counts(**{name: getattr(layer, name) for name in (*counts, "source_dim")})
    if layer.num_heads % layer.num_kv_heads:
        raise OptionError(
            saw=f"num_heads={layer.num_heads} and num_kv_heads={layer.num_kv_heads}",
            needed="num_heads divisible by num_kv_heads: each kv head serves a group of heads",
            do=f"num_kv_heads={_divisors(layer.num_heads)}",
        )
    _check_kinds(layer, score_bias)
    named = {"rotary": layer.rotary, "window": layer.window, "score_bias": score_bias}
    for name, option in named.items():
        if crosses and option is not None:
            _refuse_across(name, option, f"source_dim={layer.source_dim}")
    if layer.rotary is not None:
        layer.rotary.width_in(layer.head_dim)
    check_score_numbers(layer.scale, layer.softcap, dtype=dtype or torch.get_default_dtype())
    check_probability(layer.dropout)


def _check_kinds(layer: Parts, score_bias: object) -> None:
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
            needed="(left, right): how many keys before and after its own place a query sees",
            do="window=(W - 1, 0) for a causal window of W keys that counts the query's own",
        )
    if window is not None:
        band = Mask.window(*window).bands[0]  # refuses a side that is no number from 0
        layer.window = band.left, band.right  # Python's integers: those of NumPy may wrap


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _refuse_across(name: str, option: object, source: str) -> None:
    raise OptionError(
        saw=f"{name}={option} with {source}",
        needed="one or the other: places in x and in another sequence have no distance",
        do=f"leave out {name} in cross attention; a Mask or ScoreBias of the call can name an "
        "alignment",
    )


# ---- of a call ---------------------------------------------------------------------------------


def check_call(layer: Parts, x: Tensor, source: Tensor | None, cache: Cache | None) -> None:
    """Raise ShapeError, DTypeError, DeviceError or OptionError where a call does not fit."""
    check_tokens("x", x, layer.embed_dim, X_AXES, stored(layer.q_proj, x))
    if source is not None:
        check_tokens("source", source, layer.source_dim, SOURCE_AXES, stored(layer.k_proj, source))
        if source.shape[0] != x.shape[0]:
            raise ShapeError(
                saw=f"x {sizes(x, X_AXES)} and source {sizes(source, SOURCE_AXES)}",
                needed="the same batch",
                do="source.expand(...), or one source for each sequence",
            )
    elif layer.source_dim != layer.embed_dim:
        raise OptionError(
            saw=f"no source for a layer with source_dim={layer.source_dim}, "
            f"embed_dim={layer.embed_dim}",
            needed="a source (batch, keys, source_dim)",
            do="layer(x, source)",
        )
    crosses = source is not None
    for name in ("rotary", "window", "score_bias") if crosses else ():
        if getattr(layer, name) is not None:
            _refuse_across(name, getattr(layer, name), "a source")
    if cache is not None:
        _check_cache(layer, cache, crosses=crosses)


def stored(projection: nn.Module, otherwise: Tensor) -> Tensor:
    """A parameter of it, for its device and dtype; what quantises may leave none.

    Not ``weight``: a parametrised one is computed each time it is read, and spectral_norm takes a
    step of its iteration.
    """
    return next(projection.parameters(), otherwise)


def check_tokens(
    name: str, x: Tensor, width: int, axes: tuple[str, str, str], weight: Tensor
) -> None:
    """Raise ShapeError, DTypeError or DeviceError unless ``weight`` can project these tokens."""
    if not isinstance(x, Tensor):
        raise ShapeError(
            saw=f"{name}={describe_value(x)}",
            needed=f"a tensor ({axes[0]}, {axes[1]}, {axes[2]} {width})",
            do="layer(x, source, mask=..., score_bias=..., gate=..., cache=...)",
        )
    if x.dim() != 3 or x.shape[2] != width:
        raise ShapeError(
            saw=f"{name} of shape {tuple(x.shape)}",
            needed=f"({axes[0]}, {axes[1]}, {axes[2]} {width})",
            do=_shaped(name, x, width),
        )
    if x.device != weight.device:
        raise DeviceError(
            saw=f"{name} on {x.device} for a layer on {weight.device}",
            needed="one device",
            do=f'{name}.to("{weight.device}"), or layer.to("{x.device}")',
        )
    mixed = x.is_floating_point() and weight.is_floating_point() and x.dtype != weight.dtype
    if not x.is_floating_point() or (mixed and not torch.is_autocast_enabled(x.device.type)):
        raise DTypeError(
            saw=f"{name} of dtype {x.dtype} for weights of {weight.dtype}",
            needed="one dtype for both, or autocast",
            do=f"{name}.to({weight.dtype}), or layer.to({x.dtype})"
            if x.is_floating_point()
            else f"{name}.to({weight.dtype}); token ids go through an nn.Embedding first",
        )


def _shaped(name: str, x: Tensor, width: int) -> str:
    """What makes tokens of a tensor of another shape."""
    if x.dim() == 0 or x.shape[-1] != width:
        if x.dim() == 3 and x.shape[1] == width:
            return f"{name}.transpose(1, 2): its second axis is {width} wide"
        return f"pass {name} of width {width}, or construct the layer for the width of {name}"
    if x.dim() < 3:
        return f"{name}[None] for one sequence" if x.dim() == 2 else f"{name}[None, None]"
    return f"{name}.flatten(0, {x.dim() - 3}): further axes belong to the batch"


def _check_cache(layer: Parts, cache: Cache, *, crosses: bool) -> None:
    if not isinstance(cache, Cache):
        raise OptionError(
            saw=f"cache={describe_value(cache)}",
            needed="a Cache of this layer",
            do="cache = layer.cache(batch=..., length=...)",
        )
    if crosses:
        raise OptionError(
            saw="a cache and a source",
            needed="one or the other: a cache holds keys and values of x",
            do="leave out the cache in cross attention",
        )
    if cache.owner != layer.identity:
        raise OptionError(
            saw=f"{cache!r}, which this layer did not make",
            needed="a cache for each layer, made by it",
            do="caches = [layer.cache(batch=..., length=...) for layer in layers]",
        )


def checked_gate(gate: Tensor, x: Tensor, num_heads: int) -> Tensor:
    """The gate, if it has one factor for each head, or for each head of each sequence."""
    if not isinstance(gate, Tensor) or gate.device != x.device:
        place = f" on {gate.device}" if isinstance(gate, Tensor) else ""
        raise DeviceError(
            saw=f"a gate that is a {type(gate).__name__}{place}",
            needed=f"a tensor on {x.device}",
            do=f'torch.ones({num_heads}, device="{x.device}")',
        )
    if gate.shape not in ((num_heads,), (x.shape[0], num_heads)):
        raise ShapeError(
            saw=f"a gate of shape {tuple(gate.shape)}",
            needed=f"(heads {num_heads},) or (batch {x.shape[0]}, heads {num_heads})",
            do="e.g. torch.ones(num_heads)",
        )
    return gate


def check_fits(call: Call, *, heads: int, keys: int) -> None:
    """Raise what mask and score bias do not fit, before a cache is changed."""
    batch, queries, _ = call.x.shape
    sizes = {"batch": batch, "heads": heads, "queries": queries, "keys": keys}
    bands_and_places = replace(call.mask, key_lengths=None, query_lengths=None)
    bands_and_places.bind(**sizes, device=call.x.device)
    call.score_bias.check(**sizes, device=call.x.device)


# ---- in print ----------------------------------------------------------------------------------


def described(layer: Parts) -> str:
    """The sizes, and what is not as it is by default, but for what is a module."""
    parts = [f"{layer.embed_dim} to {layer.num_heads} heads of {layer.head_dim}"]
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
