"""How much a layer learns."""

from __future__ import annotations

from torch import nn


def parameters(layer: nn.Module) -> int:
    """How many numbers a layer learns."""
    return sum(p.numel() for p in layer.parameters())
