"""A layer made of the weights of any layout, and its own weights in any layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from headwise.errors import OptionError
from headwise.layers.native.parts import Parts
from headwise.layers.positions import Alibi, Rotary, T5Bias
from headwise.layouts import rotation
from headwise.layouts.canonical import State
from headwise.layouts.function import SCALES, USUAL_SCALE, Function
from headwise.layouts.layout import Layout
from headwise.layouts.places import modules_of
from headwise.layouts.registry import layout


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


def options_of(canonical: State, function: Function, given: Mapping[str, Any]) -> dict[str, Any]:
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


def own_layout(layer: Parts) -> Layout:
    """The layout of the layer's own tensors."""
    norm = layer.qk_norm
    return layout("headwise-width-norm" if norm and norm.over == "width" else "headwise")


def in_own_order(canonical: State, layer: Parts) -> State:
    """Canonical tensors with head_dim in the order of the layer's rotation."""
    if layer.rotary is None or layer.rotary.pairing == "half-split":
        return canonical
    return rotation.neighbours(canonical, width=layer.rotary.width_in(layer.head_dim))


def canonical_state(layer: Parts, state: Mapping[str, Tensor]) -> State:
    """The canonical tensors of a layer, whose state_dict is given."""
    canonical = own_layout(layer).unpack(state, heads=layer.num_heads, kv_heads=layer.num_kv_heads)
    if layer.rotary is None or layer.rotary.pairing == "half-split":
        return canonical
    return rotation.halves(canonical, width=layer.rotary.width_in(layer.head_dim))
