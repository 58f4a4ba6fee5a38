"""Canonical tensors for any layout, at sizes in which no two axes coincide."""

from collections.abc import Mapping

import torch

from headwise.function.weights import AXES, BIASES, State
from headwise.layouts._layout import Layout
from headwise.layouts.drawing import equalise_indistinct_axes
from headwise.layouts.pattern import Sizes

SIZES = {
    "heads": 12,
    "kv_heads": 3,
    "head_dim": 10,
    "key_dim": 9,
    "value_dim": 7,
    "embed_dim": 40,
    "query_dim": 38,
    "source_dim": 36,
    "out_dim": 44,
    "buckets": 5,
    "gate_width": 8,
    "shared_width": 6,
    "rank": 36,
    "lambda_dim": 11,
}
ROTARY_WIDTH = 6


def sizes_of(layout: Layout, sizes: Mapping[str, int] = SIZES) -> Sizes:
    """``sizes``, with axes made equal that the layout cannot tell apart."""
    return equalise_indistinct_axes(layout, sizes)


def known_of(layout: Layout) -> dict[str, int]:
    """What a call has to say: the counts that no shape tells."""
    sizes = sizes_of(layout)
    known = {name: sizes[name] for name in ("heads", "kv_heads")}
    return known | width_of(layout)


def width_of(layout: Layout) -> dict[str, int]:
    """How much of a head turns, where that is to be said."""
    is_open = layout.rows == "interleaved" and layout.function.is_rotary_width_open
    return {"rotary_width": ROTARY_WIDTH} if is_open else {}


def tensors_of(layout: Layout, *, with_biases: bool = True) -> set[str]:
    """The canonical tensors that the layout has a place for."""
    found = {tensor for pattern in layout.patterns.values() for tensor in pattern.tensors}
    return found if with_biases else found - set(BIASES)


def example(layout: Layout, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> State:
    """Random canonical tensors that the layout can hold, with a negative zero and an infinity."""
    sizes, generator = sizes_of(layout), torch.Generator().manual_seed(seed)
    state = {}
    for tensor in sorted(tensors_of(layout)):
        x = torch.randn([sizes[axis] for axis in AXES[tensor]], generator=generator)
        state[tensor] = x.to(dtype)
        flat = state[tensor].flatten()
        flat[0], flat[-1] = -0.0, torch.inf
    return state
