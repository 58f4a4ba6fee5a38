"""Conversion of a layer's weights from and to layouts, with checks that the function is kept."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headwise.errors import DTypeError, OptionError, ShapeError
from headwise.function import spec as rules
from headwise.function.distance import slopes_of
from headwise.function.gate import gate_width, kind_of_width
from headwise.function.spec import FROM_CONFIG, USUAL_SCALE, AttentionSpec, GateKind, Latent
from headwise.function.weights import LAMBDAS, NORMS, State, bias_of
from headwise.layers.base import AttentionBase
from headwise.layers.distance import Alibi, DebertaBias, T5Bias
from headwise.layers.options import OPTIONS, is_settled
from headwise.layouts import pattern
from headwise.layouts._layout import Layout
from headwise.layouts.modules import find_modules
from headwise.layouts.plan import FLOATING
from headwise.layouts.registry import layout

_ROUNDING = 4 * sys.float_info.epsilon  # relative error of a scale computed in another order


def canonical_tensors_of_module(
    state: Mapping[str, Tensor], source: Layout, options: Mapping[str, Any], **heads: int | None
) -> State:
    modules = find_modules(source, state)
    if source.tensors.keys().isdisjoint(state) and modules:
        prefix = modules[0].prefix
        raise OptionError(
            saw=f"{len(state)} tensors of {len(modules)} modules of {source.name}, such as "
            f"{prefix}",
            needed="the tensors of one module, by their names within it",
            do=f"{{name.removeprefix(p): x for name, x in state.items() if name.startswith(p)}} "
            f"with p={prefix!r}",
        )
    for name in source.tensors:
        if name in state and state[name].dtype not in FLOATING and options.get("dtype") is None:
            raise DTypeError(
                saw=f"{name} in {state[name].dtype}",
                needed="weights in float64, float32, bfloat16 or float16",
                do="tensor.to(torch.float32) of each, if no scales belong to them",
            )
    rotary, sizes = options.get("rotary"), {k: n for k, n in heads.items() if n is not None}
    if rotary is not None:
        source.require_whole(state)
        is_told = not source.function.is_rotary_width_open or "wr" in source.rotated
        if rotary.width is None and not is_told:
            raise OptionError(
                saw=f"{rotary} without a width",
                needed=f"a width, since {source.name} may rotate a part of each head",
                do="pass Rotary(width=...): rotary_dim in the model's config, or head_dim for all",
            )
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        solved = source.sizes(shapes, sizes)
        width = solved.get("shared_width", solved["head_dim"])
        sizes["rotary_width"] = rotary.width or width
    return source.unpack(state, **sizes)


def constructor_arguments_from_weights(
    canonical: State, function: AttentionSpec, user_options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the constructor's arguments for a layer with these tensors and this function.

    Raises:
        OptionError: no ``scale`` where the layout leaves it open; or a table of distances without
            `T5Bias`, or the reverse.
    """
    if function.scale is FROM_CONFIG and "scale" not in user_options:
        raise OptionError(
            saw="no scale",
            needed="scale, which this layout leaves to the model's config",
            do="pass scale=None for 1/sqrt(head_dim), or the number",
        )
    _check_table(canonical.get("distances"), user_options.get("score_bias"))
    _check_places(canonical, user_options.get("score_bias"))
    wq, wk, wo = (canonical[name] for name in ("wq", "wk", "wo"))
    (heads, head_dim, embed_dim), source_dim, gates = wq.shape, wk.shape[2], canonical.get("wg")
    options: dict[str, Any] = {
        "embed_dim": embed_dim,
        "num_heads": heads,
        "num_kv_heads": wk.shape[0],
        "head_dim": head_dim,
        "value_dim": wo.shape[1],
        "out_dim": wo.shape[2],
        "sink": "sink" in canonical,
        "output_gate": kind_of_width(gates.shape[1] if gates is not None else None) or None,
        "dtype": wq.dtype,
        "device": wq.device,
    }
    biases = ("q", "k", "v", "out", "gate")
    options |= {f"{name}_bias": f"b{name[0]}" in canonical for name in biases}
    sized = replace(function, num_heads=heads, head_dim=head_dim)
    if "wc" in canonical:
        options |= {"embed_dim": canonical["wc"].shape[1], "latent_bias": "bc" in canonical}
        sized = replace(sized, latent=_latent_of_weights(canonical, function.compressed))
    elif source_dim != embed_dim:
        options["source_dim"] = source_dim
    options |= options_of_spec(sized) | dict(user_options)
    _check_pairs(canonical, options.get("differential"))
    _check_gates(options["output_gate"], gates, value_dim=wo.shape[1])
    return options


def _check_table(table: Tensor | None, score_bias: Any) -> None:
    is_bias = isinstance(score_bias, T5Bias)
    if is_bias and table is None:
        raise OptionError(
            saw="score_bias=T5Bias(...) without a table of distances",
            needed="the table, which T5 stores in its first layer for all layers",
            do="add the first layer's table to the tensors of this layer",
        )
    if table is not None and not is_bias:
        raise OptionError(
            saw="a table of distances without score_bias=T5Bias(...)",
            needed="T5Bias for T5's table; the layer has no parameter for other tables",
            do="pass score_bias=T5Bias(...), or remove the table and pass a ScoreBias in calls",
        )
    if table is not None and len(table) != score_bias.buckets:
        raise ShapeError(
            saw=f"T5Bias(buckets={score_bias.buckets}), and a table of {len(table)}",
            needed="as many buckets as the table has rows",
            do=f"T5Bias(buckets={len(table)}), if that is what the model means",
        )


def _check_places(canonical: State, score_bias: Any) -> None:
    """Raise OptionError or ShapeError where DeBERTa's tensors and the option differ."""
    rule = score_bias if isinstance(score_bias, DebertaBias) else None
    table, needed = canonical.get("place_table"), set[str]()
    if rule is not None:
        needed = {"place_table"} | ({"place_norm"} if rule.eps is not None else set())
        projections = {"c2p": "wpk", "p2c": "wpq"}
        needed |= set() if rule.is_shared else {projections[term] for term in rule.terms}
    held = canonical.keys() & {"place_table", "place_norm", "wpk", "wpq"}
    if held != needed:
        raise OptionError(
            saw=f"score_bias={score_bias}, and tensors {', '.join(sorted(held)) or 'of none'}",
            needed=f"tensors {', '.join(sorted(needed)) or 'of no relative positions'}",
            do="pass score_bias=DebertaBias(...) as the model's config has it, with its table, "
            "which all layers share; or leave these tensors out",
        )
    if rule is not None and table is not None and len(table) != 2 * rule.span:
        raise ShapeError(
            saw=f"DebertaBias(span={rule.span}), and a table of {len(table)} rows",
            needed=f"{2 * rule.span} rows: span to both sides",
            do=f"DebertaBias(span={len(table) // 2}), if that is what the model means",
        )


def _check_pairs(canonical: State, differential: Any) -> None:
    """Raise OptionError where tensors and the option of differential attention differ."""
    if (LAMBDAS[0] in canonical) != (differential is not None):
        raise OptionError(
            saw=f"differential={differential}, {'with' if differential is None else 'without'} "
            f"tensors {', '.join(LAMBDAS)}",
            needed="both or none of them",
            do="pass differential=DifferentialRule(init, eps): init is 0.8 - 0.6 exp(-0.3 layer)",
        )


def _check_gates(kind: GateKind | None, gates: Tensor | None, *, value_dim: int) -> None:
    """Raise ShapeError where weights hold another number of gates than a kind has."""
    if kind is None or gates is None or gates.shape[1] == gate_width(kind, value_dim):
        return
    raise ShapeError(
        saw=f"output_gate={kind!r}, and weights with {gates.shape[1]} gates for each head",
        needed=f"{gate_width(kind, value_dim)} for each head",
        do="name the layout that these weights are in, or another output_gate",
    )


def _latent_of_weights(canonical: State, stated: Latent | None) -> Latent:
    a, c, r = (canonical.get(name) for name in ("wa", "wc", "wr"))
    assert c is not None
    assert r is not None
    key_dim, head_dim, shared = canonical["wk"].shape[1], canonical["wq"].shape[1], r.shape[0]
    if key_dim + shared != head_dim:
        raise ShapeError(
            saw=f"keys of {key_dim} channels from the latent and {shared} that heads share, and "
            f"queries of {head_dim}",
            needed=f"queries of {key_dim + shared} channels, the sum of both",
            do="give the heads that the model has, or the layout that its weights are in",
        )
    rank = None if a is None else a.shape[0]
    sizes: dict[str, Any] = {"rank": c.shape[0], "shared_width": r.shape[0], "query_rank": rank}
    return replace(stated or Latent(), **sizes, normed="c_norm" in canonical)


def layout_of_layer(layer: AttentionBase) -> Layout:
    norm = layer.qk_norm
    if layer.latent is not None:
        return layout("headwise-latent")
    return layout("headwise-width-norm" if norm and norm.over == "width" else "headwise")


def layer_state_dict_from_canonical(canonical: State, layer: AttentionBase) -> dict[str, Tensor]:
    """Return the layer's state_dict from canonical tensors, head_dim in its rotation's order."""
    if layer.rotary is not None and layer.rotary.pairing != "half-split":
        width = layer.rotary.rotated_width(layer.head_dim)
        rotated = layout_of_layer(layer).rotated
        canonical = pattern.to_interleaved(canonical, width=width, rotated=rotated)
    if layer.qk_norm is not None and layer.qk_norm.kind == "layer":  # ESM C's have no bias
        norms = {bias_of(n): torch.zeros_like(x) for n, x in canonical.items() if n in NORMS}
        canonical = norms | canonical
    if layer.place_tables is not None:  # DeBERTa v1 has no bias of the keys of places
        biases = {f"b{n[1:]}": canonical[n] for n in ("wpq", "wpk") if n in canonical}
        canonical = {n: x.new_zeros(x.shape[:2]) for n, x in biases.items()} | canonical
    return layout_of_layer(layer).pack(canonical)


def state_per_head(layer: AttentionBase, state: Mapping[str, Tensor]) -> State:
    """Return the tensors of a layer per head, head_dim in its rotation's order."""
    source = layout_of_layer(layer)
    return source.unpack(state, heads=layer.num_heads, kv_heads=layer.num_kv_heads)


def canonical_state(layer: AttentionBase, state: Mapping[str, Tensor]) -> State:
    canonical = state_per_head(layer, state)
    if layer.rotary is None or layer.rotary.pairing == "half-split":
        return canonical
    width, rotated = layer.rotary.rotated_width(layer.head_dim), layout_of_layer(layer).rotated
    return pattern.to_half_split(canonical, width=width, rotated=rotated)


# ---- the function -------------------------------------------------------------------------------


def spec_of_layer(layer: AttentionBase) -> AttentionSpec:
    rotary, scale, usual = layer.rotary, layer.scale, layer.head_dim**-0.5
    is_usual = scale is None or math.isclose(scale, usual, rel_tol=_ROUNDING)
    options = {name: getattr(layer, name) for name in OPTIONS}
    fields = {name: OPTIONS[name].field(x) for name, x in options.items() if x is not None}
    if rotary is not None:
        fields["rotary"] = replace(rotary.rule, width=rotary.rotated_width(layer.head_dim))
    return AttentionSpec(
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        scale=USUAL_SCALE if scale is None or is_usual else scale,
        **fields,
    )


def options_of_spec(spec: AttentionSpec) -> dict[str, Any]:
    """Return the options of `Attention` by which a layer has this function.

    Settings that are open, and forms that no layer has, have none.
    """
    fields = {name: getattr(spec, name) for name in OPTIONS}
    options = {name: OPTIONS[name].option(x) for name, x in fields.items() if is_settled(x)}
    if spec.scale == USUAL_SCALE:
        options["scale"] = None
    elif isinstance(spec.scale, float | int) or (spec.scale and spec.head_dim):
        options["scale"] = spec.factor
    if options.get("score_bias") is None and spec.num_heads and spec.head_dim:
        with torch.device("cpu"):  # they are read here, also for a model on the meta device
            slopes = slopes_of(spec)
        options["score_bias"] = None if slopes is None else Alibi(slopes=(*slopes.tolist(),))
    return {name: x for name, x in options.items() if x is not None or name == "scale"}


def require_same_function_as_source(
    layout: Layout, layer: AttentionBase, accept: Iterable[str]
) -> None:
    expected, actual = layout.function, spec_of_layer(layer)
    is_described = isinstance(expected.score_bias, rules.Other) or (
        isinstance(expected.score_bias, rules.AlibiRule) and expected.score_bias.before_scale
    )
    has_slopes = isinstance(actual.score_bias, rules.AlibiRule) and actual.score_bias.slopes
    if is_described and (has_slopes or isinstance(actual.score_bias, rules.Other)):
        actual = replace(actual, score_bias=FROM_CONFIG)  # trust the user's class for it
    conflicts = expected.conflicts(actual)
    options = ", ".join(f"{name}=..." for name in conflicts)
    rules.require_conflicts_accepted(
        conflicts,
        accept,
        between=f"{layout.name} and a layer with these options",
        do=f"pass {options} as in the layout and the model's config; or",
    )


def advise_wrapped_tensors(state: Mapping[str, Any]) -> list[str]:
    name = "out_proj.weight"
    for key, value in state.items():
        if isinstance(value, Mapping) and any(inner.endswith(name) for inner in value):
            return [f"the tensors stand one level deeper: layer.load_state_dict(state[{key!r}])"]
        if (start := key.removesuffix(name)) != key and start:
            renamed = f"{{n.removeprefix({start!r}): t for n, t in state.items()}}"
            return [f"the names begin with {start!r}: layer.load_state_dict({renamed})"]
    return []


def advise_foreign_tensors(
    layer: AttentionBase, state: Mapping[str, Tensor], prefix: str
) -> list[str]:
    """Return the line that loads tensors under a prefix from another layout, or none."""
    if not prefix and (advice := advise_wrapped_tensors(state)):
        return advice
    names = layer.state_dict().keys()
    given = {name.removeprefix(prefix) for name in state if name.startswith(prefix)}
    if names <= given or given <= names:
        return []
    named = "... (headwise.detect(state) names it)"
    for candidate in map(layout, ("torch-packed", "torch-separate")):
        if candidate.required <= given <= candidate.tensors.keys():
            named = repr(candidate.name)
    start = f"{{n.removeprefix({prefix!r}): t for n, t in state.items()}}" if prefix else "state"
    return [
        f"these tensors are in another layout: headwise.Attention.from_layout({start}, "
        f"layout={named}, num_heads={layer.num_heads})"
    ]
