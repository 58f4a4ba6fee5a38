"""Geometries of the second set: multi-head with partial rotary pairs, and grouped with norms."""

from __future__ import annotations

from benchmarks.faults.geometry import Geometry, NormSettings, RotarySettings

SECOND_GEOMETRIES = (
    Geometry(
        "wide-values",
        92,
        7,
        7,
        18,
        22,
        biases=True,
        out_bias=True,
        rotary=RotarySettings("interleaved", 10, theta=25_000.0),
        causal=True,
    ),
    Geometry(
        "layer-norm-groups",
        116,
        10,
        5,
        16,
        16,
        rotary=RotarySettings("half-split", 16, scaling="linear", factor=2.5),
        causal=True,
        window=7,
        softcap=25.0,
        qk_norm=NormSettings("layer"),
    ),
)
