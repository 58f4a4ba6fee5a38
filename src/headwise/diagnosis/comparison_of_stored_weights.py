"""Sides of a comparison that are stored: files, folders and state dicts, also beside a module."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from torch import Tensor, nn

from headwise.checkpoints.attention_loading import load_attention
from headwise.diagnosis.diagnosis_result import Diagnosis
from headwise.diagnosis.subjects.recording_file import is_recording
from headwise.diagnosis.subjects.transformers_subject import is_transformers_attention, layer_index
from headwise.diagnosis.verify import verify
from headwise.layers.native.attention import Attention

WEIGHTS = (str, os.PathLike, Mapping)
NAMED_LAYERS = (Attention, nn.MultiheadAttention)


def is_stored_weights(value: object) -> TypeGuard[str | Path | Mapping[str, Tensor]]:
    """True for weights: a file, a folder or a state dict."""
    return isinstance(value, WEIGHTS) and not is_recording(value)


def can_compare_as_weights(a: object, b: object) -> bool:
    """True for two sets of weights, and for a set with a module whose weights have names.

    Those are layers of headwise and torch and, beside a state dict, modules with a config.
    """
    pairs = ((a, b), (b, a))
    return all(map(is_stored_weights, (a, b))) or any(
        is_stored_weights(stored) and _has_named_weights(module, stored) for stored, module in pairs
    )


def _has_named_weights(module: object, stored: object) -> TypeGuard[nn.Module]:
    has_config = isinstance(stored, Mapping) and hasattr(module, "config")
    return isinstance(module, NAMED_LAYERS) or (has_config and isinstance(module, nn.Module))


def compare_stored_weights(*sides: Any) -> Diagnosis:
    """Compare two sets of weights; of a module, those in its state dict."""
    module = next((side for side in sides if isinstance(side, nn.Module)), None)
    first, second = (s.state_dict() if isinstance(s, nn.Module) else s for s in sides)
    if module is not None and not isinstance(module, NAMED_LAYERS):
        config: Any = module.config
        return verify(first, second, config=config.to_dict())
    heads = None if module is None else module.num_heads
    kv_heads = module.num_kv_heads if isinstance(module, Attention) else None
    return verify(first, second, heads=heads, kv_heads=kv_heads)


def load_layer_of_same_number(value: object, other: object) -> object:
    """Return the stored layer of the same number, for files beside an attention of transformers."""
    is_file = isinstance(value, str | Path) and not is_recording(value)
    if is_file and is_transformers_attention(other):
        return load_attention(Path(str(value)), layer=layer_index(other))
    return value
