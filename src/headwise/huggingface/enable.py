"""Models of transformers, switched to headwise's attention for a while and back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from headwise.huggingface import NAME, register_huggingface


@contextmanager
def switched(model: nn.Module) -> Iterator[None]:
    """Attention by `AttentionMatrix` wherever transformers' interface is used inside ``model``.

    Models inside that compute attention by their own code are left as they are. Afterwards every
    configuration says what it said before.
    """
    if "transformers" not in sys.modules:  # then no model of it can be here
        yield
        return
    from transformers import PreTrainedModel

    members = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    configs = _configs([m.config for m in members])
    before = [getattr(config, "_attn_implementation_internal", None) for config in configs]
    register_huggingface()
    try:
        for member in members:
            if member._can_set_attn_implementation():
                member.config._attn_implementation_internal = NAME
        _switch_nested(members)
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation_internal = implementation


def _switch_nested(members: list[Any]) -> None:
    """Configurations inside one that was switched, where no model of their own decides."""
    decided = {id(m.config) for m in members}
    for member in members:
        if member.config._attn_implementation_internal == NAME:
            for config in _configs([member.config]):
                if id(config) not in decided:
                    config._attn_implementation_internal = NAME


def _configs(roots: list[Any]) -> list[Any]:
    """Every configuration and those inside it, each once."""
    found: dict[int, Any] = {}
    waiting = list(roots)
    while waiting:
        config = waiting.pop()
        if config is None or id(config) in found:
            continue
        found[id(config)] = config
        waiting += [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return list(found.values())
