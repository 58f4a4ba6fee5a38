"""Injectors of the fault bench, one family a file."""

from __future__ import annotations

from benchmarks.faults.injectors import (
    adapters,
    decoding,
    distance_bias,
    head_order,
    head_shapes,
    kv_heads,
    layers,
    masks,
    modules,
    packing,
    qk_norm,
    roles,
    rotary,
    rotary_code,
    rotary_rows,
    scores,
    shards,
    softmax,
    transposes,
    values,
)
from benchmarks.faults.injectors.injector import Injector

INJECTORS: tuple[Injector, ...] = (
    *roles.INJECTORS,
    *packing.INJECTORS,
    *head_order.INJECTORS,
    *transposes.INJECTORS,
    *rotary_rows.INJECTORS,
    *kv_heads.INJECTORS,
    *layers.INJECTORS,
    *shards.INJECTORS,
    *values.INJECTORS,
    *rotary.INJECTORS,
    *rotary_code.INJECTORS,
    *head_shapes.INJECTORS,
    *scores.INJECTORS,
    *distance_bias.INJECTORS,
    *qk_norm.INJECTORS,
    *masks.INJECTORS,
    *softmax.INJECTORS,
    *modules.INJECTORS,
    *adapters.INJECTORS,
    *decoding.INJECTORS,
)
