"""Checks of a layer's options and of the arguments of its call."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor, nn

from headwise.errors import DeviceError, DTypeError, OptionError, ShapeError
from headwise.function.rotary import Rotary
from headwise.function.stages import split_heads
from headwise.layers import distance, norm, packing
from headwise.layers.cache import Cache
from headwise.masks.clauses.band import Band
from headwise.masks.clauses.lengths import PaddingClause
from headwise.masks.mask import Mask
from headwise.matrix.checks import check_probability, check_scale_and_softcap
from headwise.support.text import describe_move, describe_sizes, describe_value, nearest_counts

if TYPE_CHECKING:
    from headwise.layers.attention import Attention

X_AXES = ("batch", "queries", "embed_dim")
SOURCE_AXES = ("batch", "keys", "source_dim")
POSITIONAL_OPTIONS = ("rotary", "window", "score_bias")  # need positions in one sequence


# ---- options ------------------------------------------------------------------------------------


def width_of_head(embed_dim: int, num_heads: int, head_dim: int | None) -> int:
    """Return head_dim, by default embed_dim / num_heads; OptionError if that is not whole."""
    if head_dim is not None:
        return head_dim
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
    score_bias: distance.PositionBias | None,
    *,
    crosses: bool,
    dtype: torch.dtype | None,
) -> None:
    """Raise OptionError if sizes or options contradict each other."""
    counts = ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "value_dim", "out_dim")
    check_positive_whole_numbers(**{name: getattr(layer, name) for name in (*counts, "source_dim")})
    if layer.num_heads % layer.num_kv_heads:
        divisors = (n for n in range(1, layer.num_heads + 1) if layer.num_heads % n == 0)
        raise OptionError(
            saw=f"num_heads={layer.num_heads} and num_kv_heads={layer.num_kv_heads}",
            needed="num_heads divisible by num_kv_heads: each kv head serves a group of heads",
            do="num_kv_heads=" + ", ".join(map(str, divisors)),
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
        ("qk_norm", layer.qk_norm, norm.QKNorm, "a QKNorm", "qk_norm=QKNorm()"),
        (
            "score_bias",
            score_bias,
            distance.PositionBias,
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


# ---- arguments of a call ------------------------------------------------------------------------


def projection_parameter(projection: nn.Module, default: Tensor) -> Tensor:
    """Return a parameter of a projection, for its device and dtype; ``default`` without any.

    The attribute ``weight`` is avoided: parametrizations compute it on each access, and
    spectral_norm then takes a step of its iteration.
    """
    weight = projection._parameters.get("weight")
    return next(projection.parameters(), default) if weight is None else weight


def check_tokens(
    name: str, x: Tensor, width: int, axes: tuple[str, str, str], projection: nn.Module
) -> None:
    """Raise ShapeError, DTypeError or DeviceError unless the projection fits these tokens."""
    if not isinstance(x, Tensor):
        raise ShapeError(
            saw=f"{name}={describe_value(x)}",
            needed=f"a tensor ({axes[0]}, {axes[1]}, {axes[2]} {width})",
            do=f"{name}=torch.as_tensor({name})"
            if hasattr(x, "__array__") or isinstance(x, list)
            else "layer(x, source, mask=..., score_bias=..., gate=..., cache=...)",
        )
    weight = projection_parameter(projection, x)
    if x.dim() != 3 or x.shape[2] != width:
        raise ShapeError(
            saw=f"{name} of shape {tuple(x.shape)}",
            needed=f"({axes[0]}, {axes[1]}, {axes[2]} {width})",
            do=_shape_advice(name, x, width),
        )
    if x.device != weight.device:
        raise DeviceError(
            saw=f"{name} on {x.device} for a layer on {weight.device}",
            needed="one device",
            do=describe_move(name, x, weight.device),
        )
    if x.is_floating_point() and (x.dtype == weight.dtype or not weight.is_floating_point()):
        return
    if not x.is_floating_point() or not torch.is_autocast_enabled(x.device.type):
        raise DTypeError(
            saw=f"{name} of dtype {x.dtype} for weights of {weight.dtype}",
            needed="one dtype for both, or autocast",
            do=f"{name}.to({weight.dtype}), or layer.to({x.dtype})"
            if x.is_floating_point()
            else f"{name}.to({weight.dtype}); token ids go through an nn.Embedding first",
        )


def _shape_advice(name: str, x: Tensor, width: int) -> str:
    """Return the code or advice that gives ``x`` the shape of tokens."""
    if x.dim() == 0 or x.shape[-1] != width:
        if x.dim() == 3 and x.shape[1] == width:
            return f"{name}.transpose(1, 2): its second axis is {width} wide"
        return f"pass {name} of width {width}, or construct the layer for the width of {name}"
    if x.dim() < 3:
        return f"{name}[None] for one sequence" if x.dim() == 2 else f"{name}[None, None]"
    return f"{name}.flatten(0, {x.dim() - 3}): all leading axes are the batch"


def check_source(x: Tensor, source: Tensor, width: int, projection: nn.Module) -> None:
    """Raise the errors of `check_tokens`, and ShapeError for a source of another batch."""
    check_tokens("source", source, width, SOURCE_AXES, projection)
    if source.shape[0] != x.shape[0]:
        raise ShapeError(
            saw=f"x {describe_sizes(x, X_AXES)} and source {describe_sizes(source, SOURCE_AXES)}",
            needed="the same batch",
            do="source.expand(...), or one source for each sequence",
        )


def refuse_missing_source(source_dim: int, embed_dim: int) -> NoReturn:
    """Raise OptionError for a call without the source that the layer needs for its keys."""
    raise OptionError(
        saw=f"no source for a layer with source_dim={source_dim}, embed_dim={embed_dim}",
        needed="a source (batch, keys, source_dim)",
        do="layer(x, source)",
    )


def refuse_in_cross_attention(name: str, option: object, source: str) -> NoReturn:
    """Raise OptionError for an option that depends on positions, in cross attention."""
    raise OptionError(
        saw=f"{name}={option} with {source}",
        needed="one or the other: positions in x and in the source have no distance",
        do=f"leave out {name}; pass the call a Mask or ScoreBias with align=... instead",
    )


def check_cache_owner(cache: Cache, identity: str, *, crosses: bool) -> None:
    """Raise OptionError for a cache of another layer, or in cross attention."""
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
            do="leave out cache=...",
        )
    if cache.owner != identity:
        raise OptionError(
            saw=f"{cache!r}, which this layer did not make",
            needed="a cache made by this layer",
            do="caches = [layer.cache(batch=..., length=...) for layer in layers]",
        )


def split_projection(name: str, x: Tensor, axis: str, heads: int, width: int) -> Tensor:
    """Split a projection into the heads of this module, (batch, heads, length, width).

    Raises:
        ShapeError: a projection that gives other channels than those of these heads.
    """
    if x.shape[-1] != heads * width:
        raise ShapeError(
            saw=f"{name} gives {x.shape[-1]} channels for {heads} {axis} of {width}",
            needed=f"{heads * width} channels, all of these heads",
            do="to divide the heads over processes, parallelize the layer by "
            "headwise.sharding.Heads(), not its projections",
        )
    return split_heads(x, heads=heads)


def check_gate(gate: Tensor, x: Tensor, num_heads: int) -> None:
    """Raise unless a gate is (heads,) or (batch, heads) on the device of x."""
    if not isinstance(gate, Tensor) or gate.device != x.device:
        device = f" on {gate.device}" if isinstance(gate, Tensor) else ""
        raise DeviceError(
            saw=f"gate is a {type(gate).__name__}{device}",
            needed=f"a tensor on {x.device}",
            do=f'torch.ones({num_heads}, device="{x.device}")',
        )
    if gate.shape not in ((num_heads,), (x.shape[0], num_heads)):
        raise ShapeError(
            saw=f"gate of shape {tuple(gate.shape)}",
            needed=f"(heads {num_heads},) or (batch {x.shape[0]}, heads {num_heads})",
            do=f"e.g. torch.ones({num_heads})",
        )


def check_mask_and_bias(call: packing.CallInputs, *, heads: int, keys: int) -> None:
    """Raise MaskError if mask or score bias have other sizes, before the cache changes."""
    batch, queries, _ = call.x.shape
    matrix = {"batch": batch, "heads": heads, "queries": queries, "keys": keys}
    call.mask.without_kind(PaddingClause).bind(**matrix, device=call.x.device)
    call.score_bias.check(**matrix, device=call.x.device)
