"""Function of a layer in the words of the layouts: scale, rotation, score bias, norm, window."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from headwise.layers.native.parts import Parts
from headwise.layers.native.qk_norm import QKNorm
from headwise.layers.positions.alibi import BIAS_MAX, AlibiSlopes
from headwise.layers.positions.relative import RelativeBias
from headwise.layouts.function import SCALES, USUAL_SCALE, Function, require_same
from headwise.layouts.layout import Layout

# Score biases that a layer has a class for; layouts describe others in free text.
_KNOWN_BIASES = ("none", "alibi", "t5")
_ROUNDING = 4 * sys.float_info.epsilon  # of a scale that was computed in another order


def function_of(layer: Parts) -> Function:
    """Return the function of a layer.

    A window without a left bound is a mask, which callers give anew: it counts as none.
    """
    rotary, window = layer.rotary, layer.window
    function = Function(
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


def require_function_of(layout: Layout, layer: Parts, accept: Iterable[str]) -> None:
    """Raise OptionError where a layer made of a layout's weights computes another function."""
    theirs, mine = layout.function, function_of(layer)
    has_own_bias = not isinstance(layer.score_bias, AlibiSlopes | RelativeBias | None)
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


def require_function_for(layout: Layout, layer: Parts, accept: Iterable[str]) -> None:
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
    if isinstance(module, RelativeBias):
        return "t5"
    if isinstance(module, AlibiSlopes):
        usual = module.bias_max == BIAS_MAX
        return "alibi" if usual else f"alibi with bias_max={module.bias_max:g}"
    return f"that of {type(module).__name__}"


def _qk_norm(norm: QKNorm) -> str:
    """Words such as "rms over head, weight + 1, before rotary"; `of_config` reads them."""
    stored = ["weight + 1"] if norm.one_plus else []
    return ", ".join([f"{norm.kind} over {norm.over}", *stored, f"{norm.place} rotary"])
