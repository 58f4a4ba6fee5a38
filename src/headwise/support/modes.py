"""Temporary modes: evaluation of modules, and one thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
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


@contextmanager
def one_thread() -> Iterator[None]:
    """Matrices of small models gain nothing from a second thread, and lose much on a busy machine.

    The number of threads is a setting of the process and is restored afterwards.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
