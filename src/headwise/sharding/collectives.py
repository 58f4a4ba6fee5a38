"""Collectives with their gradients: of tokens that ranks share, and sums over ranks.

Tokens are the first axis, so that parts of other ranks arrive in place. Global tensors here are in
the order of ranks: the tokens of rank 0, then those of rank 1, and so on. Ranks may hold different
numbers of tokens, and none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from headwise.matrix.kernels.kernel import accumulation_dtype


class _Collective(torch.autograd.Function):
    """A linear function of the tensors of all ranks, and its adjoint, which gives the gradient."""

    @staticmethod
    def forward(ctx: Any, function: Any, adjoint: Any, group: Any, *tensors: Tensor) -> Any:
        ctx.group, ctx.functions = group, (adjoint, function)
        return function(group, *tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        results = _Collective.apply(*ctx.functions, ctx.group, *gradients)  # type: ignore[no-untyped-call]
        return (None, None, None, *(results if isinstance(results, tuple) else (results,)))


@dataclass(frozen=True)
class TokenGroup:
    """A process group, and the number of tokens that each of its ranks holds."""

    group: dist.ProcessGroup
    lengths: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.lengths)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def total_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def local_tokens(self) -> int:
        return self.lengths[self.rank]


# ---- tokens ------------------------------------------------------------------------------------


def send_heads(group: TokenGroup, x: Tensor) -> Tensor:
    """Exchange tokens for heads: (length, batch, heads, width) -> (tokens, batch, heads/n, width).

    Rank r gets the heads [r heads/n, (r + 1) heads/n) of all tokens.
    """
    parts = x.unflatten(2, (group.size, -1)).movedim(2, 0).contiguous()
    out = x.new_empty(group.total_tokens, *parts.shape[2:])
    sent = [group.local_tokens] * group.size
    dist.all_to_all_single(out, parts.flatten(0, 1), list(group.lengths), sent, group.group)
    return out


def send_tokens(group: TokenGroup, x: Tensor) -> Tensor:
    return _tokens_from_ranks(group, x).movedim(0, 2).flatten(2, 3)


def _tokens_from_ranks(group: TokenGroup, x: Tensor) -> Tensor:
    """Return what each rank holds of this rank's tokens, (ranks, length, *)."""
    parts = x.new_empty(group.size, group.local_tokens, *x.shape[1:])
    received, sent = [group.local_tokens] * group.size, list(group.lengths)
    dist.all_to_all_single(parts.flatten(0, 1), x.contiguous(), received, sent, group.group)
    return parts


def gather(group: TokenGroup, x: Tensor) -> Tensor:
    """Return the tokens of all ranks: (length, *) -> (tokens, *)."""
    longest = max(group.lengths)
    padded = x.contiguous()
    if missing := longest - group.local_tokens:
        padded = torch.cat([padded, padded.new_zeros(missing, *x.shape[1:])])
    out = x.new_empty(group.size * longest, *x.shape[1:])
    dist.all_gather_single(out, padded, group.group)
    if group.total_tokens == group.size * longest:
        return out
    parts = zip(out.split(longest), group.lengths, strict=True)
    return torch.cat([part[:length] for part, length in parts])


def reduce_scatter(group: TokenGroup, x: Tensor) -> Tensor:
    """Sum over ranks, and keep the tokens of this one: (tokens, *) -> (length, *).

    The parts travel in the dtype of ``x`` and are added in its accumulation dtype.
    """
    return _tokens_from_ranks(group, x).sum(0, dtype=accumulation_dtype(x.dtype)).to(x.dtype)


# A function, and its adjoint.
HEADS = send_heads, send_tokens
TOKENS = send_tokens, send_heads
WHOLE = gather, reduce_scatter
SUMS = reduce_scatter, gather


def exchange(pair: tuple[Any, Any], x: Tensor, group: TokenGroup) -> Tensor:
    """Return what the function of a pair gives this rank; its adjoint gives the gradient."""
    return _Collective.apply(*pair, group, x)  # type: ignore[no-any-return, no-untyped-call]


# ---- point to point ----------------------------------------------------------------------------


class Transfer:
    """Tensors under way to one rank, and from another; `wait` returns those that arrived."""

    def __init__(
        self,
        group: TokenGroup,
        *,
        sent: Sequence[Tensor],
        to: int,
        received: Sequence[Tensor],
        source: int,
    ) -> None:
        self._received = tuple(received)
        self._sent = [x.contiguous() for x in sent]  # kept until they have left
        calls = [
            dist.P2POp(call, x, group=group.group, group_peer=peer % group.size)
            for call, tensors, peer in (
                (dist.isend, self._sent, to),
                (dist.irecv, self._received, source),
            )
            for x in tensors
            if x.numel()
        ]
        self._work = dist.batch_isend_irecv(calls) if calls else []

    def wait(self) -> tuple[Tensor, ...]:
        for work in self._work:
            work.wait()
        self._sent = []
        return self._received


def iterate_tensors_of_ranks(
    tensors: tuple[Tensor, ...], group: TokenGroup
) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Yield the tensors of every rank with its number, this rank first; each goes to the next.

    The tensors are (length, *). The next ones travel while the caller works on these.
    """
    for step in range(group.size):
        owner = (group.rank - step) % group.size
        last = step == group.size - 1
        if not last:
            length = group.lengths[(owner - 1) % group.size]
            transfer = Transfer(
                group,
                sent=tensors,
                to=group.rank + 1,
                received=[x.new_empty(length, *x.shape[1:]) for x in tensors],
                source=group.rank - 1,
            )
        yield owner, tensors
        if not last:
            tensors = transfer.wait()


# ---- sums over ranks ---------------------------------------------------------------------------


def sum_forward(x: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    total: Tensor = _Collective.apply(_add, _view, group, x)[0]  # type: ignore[no-untyped-call]
    return total


def sum_backward(tensors: Sequence[Tensor], *, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensors; one all-reduce sums the gradients of all that require one."""
    needed = [x.requires_grad and torch.is_grad_enabled() for x in tensors]
    if not any(needed):
        return list(tensors)
    chosen = [x for x, needs in zip(tensors, needed, strict=True) if needs]
    entered = iter(_Collective.apply(_view, _add, group, *chosen))  # type: ignore[no-untyped-call]
    return [next(entered) if needs else x for x, needs in zip(tensors, needed, strict=True)]


def sum_forward_and_backward(x: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    return sum_backward([sum_forward(x, group=group)], group=group)[0]


def _view(_: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
    # The adjoint of `_add`: each rank goes on with its own heads, and so does its gradient.
    return tuple(x.view_as(x) for x in tensors)


def _add(group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
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


def gather_heads_of_ranks(x: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the heads, the axis before the last two, of all ranks."""
    return _Collective.apply(_gather_heads, _take_heads, group, x)  # type: ignore[no-any-return, no-untyped-call]


def _gather_heads(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x, group=group)
    return torch.cat(parts, dim=-3)


def _take_heads(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    return x.chunk(group.size(), dim=-3)[group.rank()]


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
