"""Context manager that enables headwise's attention in transformers models."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from headwise.huggingface import NAME, register_huggingface


@contextmanager
def using_headwise_attention(model: nn.Module) -> Iterator[None]:
    """Use `AttentionMatrix` in all modules of ``model`` with transformers' attention interface.

    Modules that compute attention in their own code do not change. On exit, every configuration
    has its previous implementation again.
    """
    if "transformers" not in sys.modules:  # then ``model`` has no transformers modules
        yield
        return
    from transformers import PreTrainedModel

    members = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    configs = _all_configs([m.config for m in members])
    before = [getattr(config, "_attn_implementation_internal", None) for config in configs]
    register_huggingface()
    try:
        for member in members:
            if member._can_set_attn_implementation():
                member.config._attn_implementation_internal = NAME
        _enable_nested_configs(members)
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation_internal = implementation


def _enable_nested_configs(members: list[Any]) -> None:
    """Enable headwise in nested configurations that belong to no module of their own."""
    own_configs = {id(m.config) for m in members}
    for member in members:
        if member.config._attn_implementation_internal == NAME:
            for config in _all_configs([member.config]):
                if id(config) not in own_configs:
                    config._attn_implementation_internal = NAME


def _all_configs(roots: list[Any]) -> list[Any]:
    """Return the configurations and all nested ones, each once."""
    configs: dict[int, Any] = {}
    pending = list(roots)
    while pending:
        config = pending.pop()
        if config is None or id(config) in configs:
            continue
        configs[id(config)] = config
        pending += [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return list(configs.values())
