"""Whether what torch used to offer is still there, and what torch says of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch


def status_of(use: Callable[[], object]) -> str:
    """``works``, ``works, deprecated`` where torch warns that it is about to go, or ``gone``."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            use()
        except (AttributeError, ImportError, NotImplementedError, RuntimeError):
            return "gone"
    about_to_go = any("deprecated" in str(warning.message) for warning in heard)
    return "works, deprecated" if about_to_go else "works"


def status_of_once(use: Callable[[], object]) -> str:
    """The same of something that torch warns of only once in a process."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        return status_of(use)
    finally:
        torch.set_warn_always(before)
