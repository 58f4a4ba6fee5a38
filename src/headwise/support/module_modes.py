"""Modes of modules that are put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module | None) -> Iterator[None]:
    """Every module in evaluation mode while the block runs, and then in the mode it was in.

    The flags are set, not ``eval()`` called: in some modules that does more than set a flag.
    """
    modes = [] if model is None else [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training
