"""Checks of a layer's options and of the arguments of its call, with other libraries' names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

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
from headwise.support.arguments import ArgumentAdvice, renamed_arguments
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
        # This refuses a side that is no number from 0.
        (band,) = Mask.window(*window).clauses_of_kind(Band)
        layer.window = band.sides  # Python integers: those of NumPy may wrap


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
    if x.dim() == 0 or x.shape[-1] != width:
        if x.dim() == 3 and x.shape[1] == width:
            return f"{name}.transpose(1, 2): its second axis is {width} wide"
        return f"pass {name} of width {width}, or construct the layer for the width of {name}"
    if x.dim() < 3:
        return f"{name}[None] for one sequence" if x.dim() == 2 else f"{name}[None, None]"
    return f"{name}.flatten(0, {x.dim() - 3}): all leading axes are the batch"


def check_source(layer: Attention, x: Tensor, source: Tensor | None) -> None:
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
    for name in POSITIONAL_OPTIONS:
        if getattr(layer, name) is not None:
            refuse_in_cross_attention(name, getattr(layer, name), "a source")


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


# ---- other libraries' names ---------------------------------------------------------------------
# Arguments of torch.nn.MultiheadAttention, and the one-to-one renames of transformers and
# x-transformers, each with what to pass here. docs/migrating.md has the full migration guide.

_DROP_IN = "headwise.MultiheadAttention has it"
_BIASES = "q_bias={value}, k_bias={value}, v_bias={value}, out_bias={value}"
_SOURCE_DIM = ArgumentAdvice("one width of the source of keys and values", "source_dim={value}")
_NO_HINT = ArgumentAdvice("a mask for each call, or a window", "window=(None, 0)")

CONSTRUCTOR = {
    "bias": ArgumentAdvice("one option for each projection", _BIASES),
    "attention_bias": ArgumentAdvice(
        "one option for each projection; which of them it means depends on the model", _BIASES
    ),
    "batch_first": ArgumentAdvice(
        "inputs (batch, length, embed_dim): the batch is always first",
        "leave out batch_first, and pass x.transpose(0, 1) where the length is first",
    ),
    "add_bias_kv": ArgumentAdvice(
        f"a layer without an extra learned key and value; {_DROP_IN}",
        "leave it out, or use headwise.MultiheadAttention(..., add_bias_kv=True)",
    ),
    "add_zero_attn": ArgumentAdvice(
        "sink=True, whose logit stays at 0",
        "Attention(..., sink=True), then layer.sink.requires_grad_(False)",
    ),
    "kdim": _SOURCE_DIM,
    "vdim": _SOURCE_DIM,
    "causal": _NO_HINT,
    "is_causal": _NO_HINT,
    "attn_mask": ArgumentAdvice("a mask for each call", "layer(x, mask=Mask.from_torch(m))"),
    "rope_theta": ArgumentAdvice("a Rotary", "rotary=Rotary(theta={value})"),
    "sliding_window": ArgumentAdvice(
        "(left, right), beside the query's own key", "window=(sliding_window - 1, 0)"
    ),
}
COUNTS = renamed_arguments(
    num_heads="nhead n_heads heads num_attention_heads",
    num_kv_heads="kv_heads n_kv_heads num_key_value_heads",
)
# Options with another name and the same meaning.
CONSTRUCTOR |= COUNTS | renamed_arguments(
    embed_dim="d_model hidden_size dim",
    head_dim="dim_head",
    value_dim="value_dim_head",
    out_dim="dim_out",
    source_dim="dim_context",
    dropout="dropout_p attention_dropout",
    softcap="attn_logit_softcapping logit_cap",
    scale="softmax_scale",
    sink="sinks",
)

_SELF = ArgumentAdvice(
    "x, which queries, keys and values are projected from, and a source for cross attention",
    "layer(x), or layer(x, source)",
)
_WEIGHTS = "the output alone: the weights are read from layer.matrix(x)"
_CAUSAL = ArgumentAdvice("a mask", "mask=Mask.causal()")
_CACHE = ArgumentAdvice(
    "a Cache of this layer", "cache=layer.cache(batch=..., length=...), made once"
)
_NO_POSITIONS = "no positions: a layer with rotary counts its tokens"

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
    "position_ids": ArgumentAdvice(_NO_POSITIONS, "leave it out"),
    "position_embeddings": ArgumentAdvice(
        _NO_POSITIONS, "leave it out, and construct the layer with rotary=Rotary()"
    ),
}


def advice_on_positional_constructor_arguments(values: tuple[Any, ...]) -> ArgumentAdvice:
    """Return the advice for positional arguments as in torch, where the third is dropout."""
    dropout = describe_value(values[2])
    return ArgumentAdvice(
        "every option after embed_dim and num_heads by name", f"dropout={dropout}"
    )


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
