"""Layers that differ subtly: far below the tolerances that people use, or at few entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.faults.draw import Draw
from benchmarks.faults.geometry import Geometry
from benchmarks.faults.injectors.rotary import settings_of
from benchmarks.faults.reference_layer import ReferenceLayer

Pair = tuple[ReferenceLayer, ReferenceLayer]


@dataclass(frozen=True)
class SubtlePair:
    """A small change; ``make`` returns the good and the faulty layer."""

    name: str
    applies: Callable[[Geometry], bool]
    make: Callable[[ReferenceLayer, Draw], Pair]


def _rotary(**changes: Any) -> Callable[[ReferenceLayer, Draw], Pair]:
    """Return the layer and one with other rotary settings."""

    def make(layer: ReferenceLayer, draw: Draw) -> Pair:
        return layer, layer.with_geometry(rotary=replace(settings_of(layer), **changes))

    return make


def _settings(good: dict[str, Any], faulty: dict[str, Any]) -> Callable[..., Pair]:
    """Return two layers with the given settings."""

    def make(layer: ReferenceLayer, draw: Draw) -> Pair:
        return layer.with_geometry(**good), layer.with_geometry(**faulty)

    return make


def thetas(good: float, faulty: float) -> Callable[[ReferenceLayer, Draw], Pair]:
    """Return a maker of two layers with these thetas."""

    def make(layer: ReferenceLayer, draw: Draw) -> Pair:
        first, second = (_rotary(theta=theta)(layer, draw)[1] for theta in (good, faulty))
        return first, second

    return make


def scale(layer: ReferenceLayer, draw: Draw) -> Pair:
    """Return a scale that is one per cent larger."""
    return layer, layer.with_geometry(scale=layer.geometry.plain_scale * 1.01)


def one_entry(name: str, change: float) -> Callable[[ReferenceLayer, Draw], Pair]:
    """Return a maker that adds ``change`` to one random entry of a weight."""

    def make(layer: ReferenceLayer, draw: Draw) -> Pair:
        changed = layer.weight(name).detach().clone()
        changed.view(-1)[draw.integer(0, changed.numel())] += change
        return layer, layer.with_weights(**{name: changed})

    return make


def slope(layer: ReferenceLayer, draw: Draw) -> Pair:
    """Return a layer whose slope of one head is one per cent larger."""
    slopes = layer.weight("slopes").detach().clone()
    slopes[draw.integer(0, len(slopes))] *= 1.01
    return layer, layer.with_weights(slopes=slopes)


def neighbours(layer: ReferenceLayer, draw: Draw) -> Pair:
    """Return a layer with two neighbouring rows of wv exchanged."""
    wv = layer.weight("wv").detach()
    row = draw.integer(0, len(wv) - 1)
    order = torch.arange(len(wv))
    order[row], order[row + 1] = row + 1, row
    return layer, layer.with_weights(wv=wv[order])


def eps(layer: ReferenceLayer, draw: Draw) -> Pair:
    """Return the eps 1e-5 for 1e-6 in the norm of q and k."""
    norm = layer.geometry.qk_norm
    assert norm is not None
    return layer, layer.with_geometry(qk_norm=replace(norm, eps=1e-5))


def has_rotary(g: Geometry) -> bool:
    """Return True for a rotary embedding."""
    return g.rotary is not None


def self_attention(g: Geometry) -> bool:
    """Return True for self-attention."""
    return not g.cross


SUBTLE = (
    SubtlePair("theta 1e4 for 5e5", has_rotary, thetas(5e5, 1e4)),
    SubtlePair("theta 1e4 for 10,001", has_rotary, thetas(10_001.0, 1e4)),
    SubtlePair("attention factor 1.01", has_rotary, _rotary(attention_factor=1.01)),
    SubtlePair("linear scaling by 1.05", has_rotary, _rotary(scaling="linear", factor=1.05)),
    SubtlePair(
        "softcap 50 missing", lambda g: True, _settings({"softcap": 50.0}, {"softcap": None})
    ),
    SubtlePair(
        "softcap 50 for 49", lambda g: True, _settings({"softcap": 50.0}, {"softcap": 49.0})
    ),
    SubtlePair("window 8 for 9", self_attention, _settings({"window": 9}, {"window": 8})),
    SubtlePair("scale larger by one per cent", lambda g: True, scale),
    SubtlePair("one entry of wq", lambda g: True, one_entry("wq", 1e-3)),
    SubtlePair("one entry of wk", lambda g: True, one_entry("wk", 1e-3)),
    SubtlePair("one entry of wv", lambda g: True, one_entry("wv", 1e-4)),
    SubtlePair("one entry of wo", lambda g: True, one_entry("wo", 1e-4)),
    SubtlePair("one entry of bv", lambda g: g.biases, one_entry("bv", 1e-4)),
    SubtlePair("one sink's logit", lambda g: g.sink, one_entry("sink", 1e-2)),
    SubtlePair("one slope", lambda g: g.alibi, slope),
    SubtlePair("two neighbouring rows of wv", lambda g: True, neighbours),
    SubtlePair("eps of the norm", lambda g: g.qk_norm is not None, eps),
)
