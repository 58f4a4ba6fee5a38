"""Temporary evaluation mode of modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module | None) -> Iterator[None]:
    """Put every module in evaluation mode while the block runs, then restore the modes.

    ``eval()`` is not called, because some modules override it to do more than set the flag.
    """
    modes = [] if model is None else [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training
