"""Checks of the arguments of a call of a layer, and their messages."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, nn

from headwise.errors import DeviceError, DTypeError, OptionError, ShapeError
from headwise.layers.native.cache import Cache
from headwise.layers.native.padding import CallInputs
from headwise.masks.clauses.lengths import PaddingClause
from headwise.support.axes import describe_value, sizes

X_AXES = ("batch", "queries", "embed_dim")
SOURCE_AXES = ("batch", "keys", "source_dim")
BY_PLACE = ("rotary", "window", "score_bias")  # options that need places in one sequence


def stored(projection: nn.Module, otherwise: Tensor) -> Tensor:
    """Return a parameter of a projection, for its device and dtype; a quantised one may have none.

    Not the attribute ``weight``: a parametrised one is computed each time it is read, and
    spectral_norm takes a step of its iteration.
    """
    weight = projection._parameters.get("weight")
    return next(projection.parameters(), otherwise) if weight is None else weight


def check_tokens(
    name: str, x: Tensor, width: int, axes: tuple[str, str, str], projection: nn.Module
) -> None:
    """Raise ShapeError, DTypeError or DeviceError unless the projection can take these tokens."""
    if not isinstance(x, Tensor):
        raise ShapeError(
            saw=f"{name}={describe_value(x)}",
            needed=f"a tensor ({axes[0]}, {axes[1]}, {axes[2]} {width})",
            do="layer(x, source, mask=..., score_bias=..., gate=..., cache=...)",
        )
    weight = stored(projection, x)
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


def _shaped(name: str, x: Tensor, width: int) -> str:
    """Return what makes tokens of a tensor of another shape."""
    if x.dim() == 0 or x.shape[-1] != width:
        if x.dim() == 3 and x.shape[1] == width:
            return f"{name}.transpose(1, 2): its second axis is {width} wide"
        return f"pass {name} of width {width}, or construct the layer for the width of {name}"
    if x.dim() < 3:
        return f"{name}[None] for one sequence" if x.dim() == 2 else f"{name}[None, None]"
    return f"{name}.flatten(0, {x.dim() - 3}): further axes belong to the batch"


def check_source(x: Tensor, source: Tensor, width: int, projection: nn.Module) -> None:
    """Raise what `check_tokens` raises, and ShapeError for a source of another batch."""
    check_tokens("source", source, width, SOURCE_AXES, projection)
    if source.shape[0] != x.shape[0]:
        raise ShapeError(
            saw=f"x {sizes(x, X_AXES)} and source {sizes(source, SOURCE_AXES)}",
            needed="the same batch",
            do="source.expand(...), or one source for each sequence",
        )


def refuse_missing_source(source_dim: int, embed_dim: int) -> NoReturn:
    """Raise OptionError for a call without the source that the layer needs."""
    raise OptionError(
        saw=f"no source for a layer with source_dim={source_dim}, embed_dim={embed_dim}",
        needed="a source (batch, keys, source_dim)",
        do="layer(x, source)",
    )


def refuse_across(name: str, option: object, source: str) -> NoReturn:
    """Raise OptionError for an option that needs places, with keys of another sequence."""
    raise OptionError(
        saw=f"{name}={option} with {source}",
        needed="one or the other: places in x and in another sequence have no distance",
        do=f"leave out {name} in cross attention; a Mask or ScoreBias of the call can name an "
        "alignment",
    )


def check_cache(cache: Cache, identity: str, *, crosses: bool) -> None:
    """Raise OptionError unless the layer with this identity made the cache, for self-attention."""
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
    if cache.owner != identity:
        raise OptionError(
            saw=f"{cache!r}, which this layer did not make",
            needed="a cache for each layer, made by it",
            do="caches = [layer.cache(batch=..., length=...) for layer in layers]",
        )


def checked_gate(gate: Tensor, x: Tensor, num_heads: int) -> Tensor:
    """Return the gate, if it has one factor for each head, or for each head of each sequence."""
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


def check_fits(call: CallInputs, *, heads: int, keys: int) -> None:
    """Raise what mask and score bias do not fit, before a cache is changed."""
    batch, queries, _ = call.x.shape
    matrix = {"batch": batch, "heads": heads, "queries": queries, "keys": keys}
    call.mask.without(PaddingClause).bind(**matrix, device=call.x.device)
    call.score_bias.check(**matrix, device=call.x.device)
