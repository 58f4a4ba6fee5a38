"""Checks of the arguments of a layer's call, with other libraries' names for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import DeviceError, DTypeError, OptionError, ShapeError
from headwise.function.rotary import Rotary, check_positions
from headwise.function.scaling import ByLength
from headwise.function.stages import split_heads
from headwise.layers import packing
from headwise.layers.base import AttentionBase, refuse_in_cross_attention
from headwise.layers.cache import Cache
from headwise.layers.options import POSITIONAL
from headwise.masks.clauses.lengths import PaddingClause
from headwise.support.arguments import ArgumentAdvice
from headwise.support.text import describe_move, describe_sizes, describe_value
from headwise.support.tracing import may_check_values

X_AXES = ("batch", "queries", "embed_dim")
SOURCE_AXES = ("batch", "keys", "source_dim")


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
    if x.dim() == 0 or x.shape[-1] != width:
        if x.dim() == 3 and x.shape[1] == width:
            return f"{name}.transpose(1, 2): its second axis is {width} wide"
        return f"pass {name} of width {width}, or construct the layer for the width of {name}"
    if x.dim() < 3:
        return f"{name}[None] for one sequence" if x.dim() == 2 else f"{name}[None, None]"
    return f"{name}.flatten(0, {x.dim() - 3}): all leading axes are the batch"


def check_source(layer: AttentionBase, x: Tensor, source: Tensor | None) -> None:
    """Raise unless a source is there where the layer needs one, and fits the layer and ``x``."""
    if source is None:
        raise OptionError(
            saw=f"no source for a layer with source_dim={layer.source_dim},"
            f" embed_dim={layer.embed_dim}",
            needed="a source (batch, keys, source_dim)",
            do="layer(x, source)",
        )
    check_tokens("source", source, layer.source_dim, SOURCE_AXES, layer.k_proj)
    if source.shape[0] != x.shape[0]:
        raise ShapeError(
            saw=f"x {describe_sizes(x, X_AXES)} and source {describe_sizes(source, SOURCE_AXES)}",
            needed="the same batch",
            do="source.expand(...), or one source for each sequence",
        )
    for name in POSITIONAL:
        if getattr(layer, name) is not None:
            refuse_in_cross_attention(name, getattr(layer, name), "a source")


def check_cache_owner(cache: Cache, identity: str, *, crosses: bool) -> None:
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


def read_positions(
    layer: AttentionBase, x: Tensor, positions: Tensor | None, cache: Cache | None
) -> Tensor | None:
    """Return the positions of a call as (batch, queries, axes), None where it gives none.

    Raises:
        ShapeError, DTypeError, DeviceError: see `headwise.function.rotary.check_positions`.
        OptionError: positions for a layer without a place for them, or for some calls of a cache.
    """
    if cache is not None and cache.seen and cache.has_places != (positions is not None):
        were = "with positions=..." if cache.has_places else "without positions"
        raise OptionError(
            saw=f"a cache of {cache.seen} tokens that came {were}, and a call that differs in this",
            needed="positions in each call with a cache, or in none",
            do="pass positions= of the new tokens, which go on from the last ones"
            if cache.has_places
            else "leave out positions, or give those of all tokens from the first call on",
        )
    if positions is None and layer.rotary is not None and layer.rotary.numbers is not None:
        raise OptionError(
            saw="no positions for a layer that rotates by row and column",
            needed="(axes, batch, queries): the coordinates of each token, which do not count",
            do="positions=torch.stack((rows, columns)).expand(2, batch, queries)",
        )
    if positions is None:
        return None
    if not layer.takes_positions:
        raise OptionError(
            saw="positions= for a layer without rotary or temperature",
            needed="one of these, where positions act; masks and biases count tokens",
            do="leave out positions",
        )
    batch, length, _ = x.shape
    axes = 1 if layer.rotary is None else layer.rotary.axis_count
    check_positions(positions, batch, length, axes, x.device)
    positions = positions if positions.dim() == 3 else positions.expand(1, batch, length)
    return positions.expand(-1, batch, -1).movedim(0, -1)


def check_kept_frequencies(rotary: Rotary | None, cache: Cache, lengths: Tensor) -> None:
    """Raise OptionError if cached keys were rotated by frequencies of shorter sequences."""
    before, scaling = cache.reached, rotary and rotary.scaling
    if before is None or not isinstance(scaling, ByLength) or not may_check_values(lengths):
        return
    kept = scaling.are_kept(before, lengths)
    if not bool(kept.all()):
        row = int((~kept).flatten().nonzero()[0])
        raise OptionError(
            saw=f"a cache whose keys were rotated for {int(before[row])} tokens, and a sequence of "
            f"{int(lengths[row])}: {type(scaling).__name__} changes its frequencies beyond "
            f"{scaling.original_length}",
            needed="keys that are all rotated by the frequencies of one length",
            do="cache.clear(), and one call with all tokens of the sequences",
        )


def describe_border(rotary: Rotary | None, lengths: Tensor) -> str:
    """Return where a rotation changes with the length, and the longest sequence of a call."""
    assert rotary is not None
    assert isinstance(rotary.scaling, ByLength)
    kind, border = type(rotary.scaling).__name__, rotary.scaling.original_length
    return (
        f"{kind} changes its frequencies for sequences of more than {border:,} tokens, and the "
        f"longest has {int(lengths.max()):,}"
    )


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


# ---- other libraries' names ---------------------------------------------------------------------
# Arguments of torch.nn.MultiheadAttention, and the one-to-one renames of transformers and
# x-transformers, each with what to pass here. docs/migrating.md has the full migration guide.

_SELF = ArgumentAdvice(
    "x, which queries, keys and values are projected from, and a source for cross attention",
    "layer(x), or layer(x, source)",
)
_WEIGHTS = "the output alone: the weights are read from layer.matrix(x)"
_CAUSAL = ArgumentAdvice("a mask", "mask=Mask.causal()")
_CACHE = ArgumentAdvice(
    "a Cache of this layer", "cache=layer.cache(batch=..., length=...), made once"
)
_NO_POSITIONS = "no angles: a layer with rotary computes them, from positions= or by counting"

CALL = {
    **dict.fromkeys(("query", "key", "value"), _SELF),
    "hidden_states": ArgumentAdvice("x", "layer(x)"),
    **dict.fromkeys(
        ("key_value_states", "encoder_hidden_states"),
        ArgumentAdvice("source, for keys and values", "layer(x, source)"),
    ),
    "attn_mask": ArgumentAdvice(
        "a Mask for a bool mask (True = may not attend in torch), a ScoreBias for a float one",
        'mask=Mask.from_torch(m), or score_bias=ScoreBias.dense(m, axes="queries keys")',
    ),
    "key_padding_mask": ArgumentAdvice(
        "a Mask for a bool mask (True = ignored in torch), a ScoreBias for a float one",
        'mask=Mask.from_torch_padding(m), or score_bias=ScoreBias.dense(m, axes="batch keys")',
    ),
    "attention_mask": ArgumentAdvice(
        "a Mask; in transformers 1 = real",
        'mask=Mask.may_attend(m.bool(), axes="batch keys"), with & Mask.causal() in a decoder',
    ),
    "is_causal": _CAUSAL,
    "causal": _CAUSAL,
    "need_weights": ArgumentAdvice(
        _WEIGHTS, "layer(x) for the output, layer.matrix(x).head_average() for the weights"
    ),
    "average_attn_weights": ArgumentAdvice(
        _WEIGHTS, "layer.matrix(x).head_average(), or layer.matrix(x).dense() for each head"
    ),
    "output_attentions": ArgumentAdvice(
        _WEIGHTS, "layer(x) for the output, layer.matrix(x).dense() for the weights"
    ),
    "past_key_values": _CACHE,
    "past_key_value": _CACHE,
    "position_ids": ArgumentAdvice(
        "positions, where they do not count from 0 or on from a cache", "positions={value}"
    ),
    "position_embeddings": ArgumentAdvice(
        _NO_POSITIONS, "leave it out, and construct the layer with rotary=Rotary()"
    ),
}


def advice_on_positional_call_arguments(values: tuple[Any, ...]) -> ArgumentAdvice:
    """Return the advice for ``layer(query, key, value, ...)``."""
    query, key, value = values[:3]
    if len(values) > 3 or not isinstance(value, Tensor):
        return ArgumentAdvice(
            "x and source by position, everything else by name",
            "layer(x, source, mask=..., score_bias=..., gate=..., cache=...)",
        )
    if query is key and key is value:
        return ArgumentAdvice(_SELF.needed, "layer(x): pass x once for self-attention")
    if key is value:
        return ArgumentAdvice(
            _SELF.needed, "layer(query, key): keys and values come from one source"
        )
    return ArgumentAdvice(
        _SELF.needed,
        "layer(x, source) where key and value are one tensor; else project them yourself and use "
        "AttentionMatrix(q, k) @ v",
    )
