"""Sums over the ranks of a process group: with their gradients, and of gradients to clip them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def sum_forward(x: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of ``x`` over ranks."""
    total: Tensor = _SumForward.apply(group, x)[0]  # type: ignore[no-untyped-call]
    return total


def sum_backward(tensors: Sequence[Tensor], *, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensors; one all-reduce sums the gradients of all that require one."""
    needed = [x.requires_grad and torch.is_grad_enabled() for x in tensors]
    if not any(needed):
        return list(tensors)
    chosen = [x for x, needs in zip(tensors, needed, strict=True) if needs]
    entered = iter(_SumBackward.apply(group, *chosen))  # type: ignore[no-untyped-call]
    return [next(entered) if needs else x for x, needs in zip(tensors, needed, strict=True)]


def sum_forward_and_backward(x: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of ``x`` over ranks; the gradient is summed too."""
    return sum_backward([sum_forward(x, group=group)], group=group)[0]


def gather_heads_of_ranks(x: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the heads, the axis before the last two, of all ranks."""
    gathered: Tensor = _GatherHeads.apply(group, x)  # type: ignore[no-untyped-call]
    return gathered


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return _all_reduce_once_per_dtype(tensors, group=group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Each rank goes on with its own heads, so a second derivative is a sum over ranks again.
        return (None, *_SumBackward.apply(ctx.group, *gradients))  # type: ignore[no-untyped-call]


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *_SumForward.apply(ctx.group, *gradients))  # type: ignore[no-untyped-call]


class _GatherHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, x: Tensor) -> Tensor:
        ctx.first, ctx.heads = group.rank() * x.shape[-3], x.shape[-3]
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x, group=group)
        return torch.cat(parts, dim=-3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient.narrow(-3, ctx.first, ctx.heads)


def _all_reduce_once_per_dtype(
    tensors: Sequence[Tensor], *, group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Return sums over ranks in new memory, by one call for each dtype among the tensors."""
    if len(tensors) == 1:
        total = tensors[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return (total,)
    sums: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(x.dtype for x in tensors):
        places = [i for i, x in enumerate(tensors) if x.dtype == dtype]
        flat = torch.cat([tensors[i].flatten() for i in places])
        dist.all_reduce(flat, group=group)
        parts = flat.split([tensors[i].numel() for i in places])
        sums |= {i: part.view(tensors[i].shape) for i, part in zip(places, parts, strict=True)}
    return tuple(sums[i] for i in range(len(tensors)))


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
