"""A layer and the layouts: its function in their words, its weights from and to any of them."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.layers.native.base import AttentionBase
from headwise.layers.native.qk_norm import QKNorm
from headwise.layers.positions import Alibi, Rotary, T5Bias
from headwise.layers.positions.distance_bias import BIAS_MAX, AlibiSlopes, T5BucketTable
from headwise.layouts import pattern
from headwise.layouts.attention_spec import SCALES, USUAL_SCALE, AttentionSpec, require_same
from headwise.layouts.canonical import State
from headwise.layouts.layout import Layout
from headwise.layouts.module_names import modules_of
from headwise.layouts.registry import layout

# Score biases that a layer has a class for; layouts describe others in free text.
_KNOWN_BIASES = ("none", "alibi", "t5")
_ROUNDING = 4 * sys.float_info.epsilon  # of a scale that was computed in another order


def canonical_of(
    state: Mapping[str, Tensor], source: Layout, options: Mapping[str, Any], **known: int | None
) -> State:
    """The canonical tensors of a module; of the heads, as much is rotated as ``rotary`` says."""
    _require_one_module(state, source)
    rotary, given = options.get("rotary"), {k: n for k, n in known.items() if n is not None}
    if rotary is not None:
        source.require_whole(state)
        _require_width(rotary, source)
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        given["rotary_width"] = rotary.width or source.sizes(shapes, given)["head_dim"]
    return source.unpack(state, **given)


def _require_width(rotary: Rotary, source: Layout) -> None:
    if rotary.width is None and source.function.rotary_width is None:
        raise OptionError(
            saw=f"{rotary}, of the whole head",
            needed=f"its width: {source.name} may rotate a part of each head",
            do="give Rotary(width=...): rotary_dim in the model's config, or head_dim for all",
        )


def _require_one_module(state: Mapping[str, Tensor], source: Layout) -> None:
    modules = modules_of(source, state)
    if source.tensors.keys().isdisjoint(state) and modules:
        prefix = modules[0].prefix
        raise OptionError(
            saw=f"{len(state)} tensors, with {len(modules)} modules of {source.name}, such as "
            f"{prefix}",
            needed="the tensors of one module, by their names within it",
            do=f"{{name.removeprefix(p): x for name, x in state.items() if name.startswith(p)}} "
            f"with p={prefix!r}",
        )


def options_of(
    canonical: State, function: AttentionSpec, given: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a layer that holds these tensors and computes this function.

    Raises:
        OptionError: no ``scale``, where the layout leaves it open; or a table of distances without
            the score bias that reads it, or the reverse.
    """
    if function.scale is None and "scale" not in given:
        raise OptionError(
            saw="no scale",
            needed="scale, which the layout leaves to the model's config",
            do="give scale=None for 1/sqrt(head_dim), or the number",
        )
    if isinstance(given.get("score_bias"), T5Bias) and "distances" not in canonical:
        raise OptionError(
            saw="no table of distances",
            needed="one for the score_bias: T5 has it in its first layer, for all of them",
            do="put the first layer's table among the tensors of this one",
        )
    if "distances" in canonical and not isinstance(given.get("score_bias"), T5Bias):
        raise OptionError(
            saw="a table of distances, and no score_bias that reads it",
            needed="score_bias=T5Bias(...), if it is T5's; no other is a parameter of the layer",
            do="leave the table out of the tensors, and give what it adds as score_bias in calls",
        )
    wq, wk, wo = (canonical[name] for name in ("wq", "wk", "wo"))
    (heads, head_dim, embed_dim), source_dim = wq.shape, wk.shape[2]
    options: dict[str, Any] = {
        "embed_dim": embed_dim,
        "num_heads": heads,
        "num_kv_heads": wk.shape[0],
        "head_dim": head_dim,
        "value_dim": wo.shape[1],
        "out_dim": wo.shape[2],
        "sink": "sink" in canonical,
        "dtype": wq.dtype,
        "device": wq.device,
    }
    options |= {f"{name}_bias": f"b{name[0]}" in canonical for name in ("q", "k", "v", "out")}
    if source_dim != embed_dim:
        options["source_dim"] = source_dim
    if function.scale in SCALES and function.scale != USUAL_SCALE:
        options["scale"] = SCALES[function.scale](head_dim)
    if function.score_bias == "alibi":
        options["score_bias"] = Alibi()
    return options | dict(given)


def own_layout(layer: AttentionBase) -> Layout:
    """The layout of the layer's own tensors."""
    norm = layer.qk_norm
    return layout("headwise-width-norm" if norm and norm.over == "width" else "headwise")


def in_own_order(canonical: State, layer: AttentionBase) -> State:
    """Canonical tensors with head_dim in the order of the layer's rotation."""
    if layer.rotary is None or layer.rotary.pairing == "half-split":
        return canonical
    return pattern.neighbours(canonical, width=layer.rotary.width_in(layer.head_dim))


def canonical_state(layer: AttentionBase, state: Mapping[str, Tensor]) -> State:
    """The canonical tensors of a layer, whose state_dict is given."""
    canonical = own_layout(layer).unpack(state, heads=layer.num_heads, kv_heads=layer.num_kv_heads)
    if layer.rotary is None or layer.rotary.pairing == "half-split":
        return canonical
    return pattern.halves(canonical, width=layer.rotary.width_in(layer.head_dim))


# ---- the function -------------------------------------------------------------------------------


def function_of(layer: AttentionBase) -> AttentionSpec:
    """Return the function of a layer.

    A window without a left bound is a mask, which callers give anew: it counts as none.
    """
    rotary, window = layer.rotary, layer.window
    function = AttentionSpec(
        scale=_scale(layer.scale, layer.head_dim),
        rotary="none" if rotary is None else rotary.pairing,
        rotary_width=None,
        score_bias=_score_bias(layer.score_bias),
        softcap="none" if layer.softcap is None else "tanh",
        qk_norm="none" if layer.qk_norm is None else _qk_norm(layer.qk_norm),
        window="none" if window is None or window[0] is None else "left",
    )
    if rotary is None:
        return function
    sizes = {"head_dim": layer.head_dim, "rotary_width": rotary.width_in(layer.head_dim)}
    return function.with_rotary_width(sizes)


def require_function_of(layout: Layout, layer: AttentionBase, accept: Iterable[str]) -> None:
    """Raise OptionError where a layer made of a layout's weights computes another function."""
    theirs, mine = layout.function, function_of(layer)
    has_own_bias = not isinstance(layer.score_bias, AlibiSlopes | T5BucketTable | None)
    if has_own_bias and theirs.score_bias not in (None, *_KNOWN_BIASES):
        mine = replace(mine, score_bias=None)  # the user's class for what the layout describes
    conflicts = theirs.conflicts(mine)
    options = ", ".join(f"{name}=..." for name in conflicts)
    require_same(
        conflicts,
        accept,
        between=f"{layout.name} and a layer with these options",
        do=f"give {options} as the layout and the model's config say; or",
    )


def require_function_for(layout: Layout, layer: AttentionBase, accept: Iterable[str]) -> None:
    """Raise OptionError where readers of a layout compute another function than the layer."""
    conflicts = function_of(layer).conflicts(layout.function)
    require_same(conflicts, accept, between=f"this layer and {layout.name}")


def _scale(scale: float | None, head_dim: int) -> str:
    if scale is None:
        return USUAL_SCALE
    for words, number in SCALES.items():
        if math.isclose(scale, number(head_dim), rel_tol=_ROUNDING):
            return words
    return f"{scale:g}"


def _score_bias(module: nn.Module | None) -> str:
    if module is None:
        return "none"
    if isinstance(module, T5BucketTable):
        return "t5"
    if isinstance(module, AlibiSlopes):
        usual = module.bias_max == BIAS_MAX
        return "alibi" if usual else f"alibi with bias_max={module.bias_max:g}"
    return f"that of {type(module).__name__}"


def _qk_norm(norm: QKNorm) -> str:
    """Words such as "rms over head, weight + 1, before rotary"; `of_config` reads them."""
    stored = ["weight + 1"] if norm.one_plus else []
    return ", ".join([f"{norm.kind} over {norm.over}", *stored, f"{norm.place} rotary"])
