"""Adapters of peft around the projections of a layer, or around a layer."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from headwise.layers.attention import Attention


def layer_with_adapters(value: Any) -> Any:
    """Return the attention layer that a wrapper of peft holds; anything else as it is.

    torch's layer has no module for each projection, so a copy of it has the adapters merged.
    """
    if not isinstance(value, nn.Module):
        return value
    find_base: Any = getattr(value, "get_base_model", lambda: value)
    base = find_base()
    if isinstance(getattr(base, "base_layer", None), nn.MultiheadAttention):
        return _merged(copy.deepcopy(base))
    return base if isinstance(base, Attention) else value


def merge_adapters(module: nn.Module) -> nn.Module:
    """Merge each active adapter into the weight below it, in place, and return the module."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(getattr(child, "base_layer", None), nn.Module):
                setattr(parent, name, _merged(child))
    return module


@torch.no_grad()
def _merged(wrapper: Any) -> nn.Module:
    """Return the module under a wrapper of peft, with the active adapter in its weights."""
    if not (wrapper.merged or wrapper.disable_adapters):
        wrapper.merge()
    if hasattr(wrapper, "unload_and_optionally_merge_module"):
        wrapper.unload_and_optionally_merge_module(
            merge=False, safe_merge=False, adapter_names=None
        )
    base: nn.Module = wrapper.get_base_layer()
    return base
