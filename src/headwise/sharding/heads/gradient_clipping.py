"""Clipping of gradients of which some are DTensors, on one mesh or several, and some are not."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip_gradients(parameters: Iterable[Tensor], *, max_norm: float) -> Tensor:
    """Scale all gradients so that their norm together is at most ``max_norm``; return that norm.

    `torch.nn.utils.clip_grad_norm_` refuses a mix of plain parameters and DTensors, and DTensors on
    several meshes. A plain gradient counts once: it is the same on every rank.
    """
    groups: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
            groups.setdefault(mesh, []).append(parameter)
    norms = []
    for group in groups.values():
        norm = get_total_norm([p.grad for p in group if p.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    for group in groups.values():
        clip_grads_with_norm_(group, max_norm, total)
    return total
