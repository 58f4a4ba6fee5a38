"""The order of head_dim where queries and keys are rotated: which two numbers turn together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwise.layouts.canonical import AXES, ROTATED, State

if TYPE_CHECKING:
    from torch import Tensor


def halves(state: State, *, width: int) -> State:
    """From neighbours, (2i, 2i + 1), to halves, (i, i + width / 2): the canonical order.

    The first ``width`` of head_dim are rotated; the rest stays where it is.
    """
    return {name: _reordered(name, x, width, (width // 2, 2)) for name, x in state.items()}


def neighbours(state: State, *, width: int) -> State:
    """From halves to neighbours."""
    return {name: _reordered(name, x, width, (2, width // 2)) for name, x in state.items()}


def _reordered(name: str, x: Tensor, width: int, shape: tuple[int, int]) -> Tensor:
    import torch

    if name not in ROTATED:
        return x
    axis = AXES[name].index("head_dim")
    rotated, rest = x.split([width, x.shape[axis] - width], dim=axis)
    turned = rotated.unflatten(axis, shape).transpose(axis, axis + 1).flatten(axis, axis + 1)
    return turned if not rest.shape[axis] else torch.cat([turned, rest], dim=axis)
