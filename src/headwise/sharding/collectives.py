"""Collectives on the tokens of a sequence that ranks share, with their gradients.

Tokens are the first axis, so that parts of other ranks arrive in place. Global tensors here are in
the order of ranks: the tokens of rank 0, then those of rank 1, and so on. Ranks may hold different
numbers of tokens, and none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headwise.matrix.kernels.kernel import accumulation_dtype


@dataclass(frozen=True)
class TokenGroup:
    """A process group, and the number of tokens that each of its ranks holds."""

    group: dist.ProcessGroup
    lengths: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.lengths)

    @property
    def rank(self) -> int:
        """Number of this rank in the group."""
        return dist.get_rank(self.group)

    @property
    def total_tokens(self) -> int:
        """Number of tokens of all ranks."""
        return sum(self.lengths)

    @property
    def local_tokens(self) -> int:
        """Number of tokens of this rank."""
        return self.lengths[self.rank]


# ---- all to all --------------------------------------------------------------------------------


def exchange_tokens_for_heads(x: Tensor, group: TokenGroup) -> Tensor:
    """Exchange tokens for heads: (length, batch, heads, width) -> (tokens, batch, heads/n, width).

    Rank r gets the heads [r heads/n, (r + 1) heads/n) of all tokens.
    """
    return _ExchangeTokensForHeads.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def exchange_heads_for_tokens(x: Tensor, group: TokenGroup) -> Tensor:
    """Exchange heads for tokens: (tokens, batch, heads/n, width) -> (length, batch, heads, width).

    The inverse of `exchange_tokens_for_heads`.
    """
    return _ExchangeHeadsForTokens.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


class _ExchangeTokensForHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TokenGroup) -> Tensor:
        ctx.group = group
        parts = x.unflatten(2, (group.size, -1)).movedim(2, 0).contiguous()
        out = x.new_empty(group.total_tokens, *parts.shape[2:])
        sent = [group.local_tokens] * group.size
        dist.all_to_all_single(out, parts.flatten(0, 1), list(group.lengths), sent, group.group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return exchange_heads_for_tokens(gradient, ctx.group), None


class _ExchangeHeadsForTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TokenGroup) -> Tensor:
        ctx.group = group
        parts = x.new_empty(group.size, group.local_tokens, *x.shape[1:])
        received = [group.local_tokens] * group.size
        dist.all_to_all_single(
            parts.flatten(0, 1), x.contiguous(), received, list(group.lengths), group.group
        )
        return parts.movedim(0, 2).flatten(2, 3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return exchange_tokens_for_heads(gradient, ctx.group), None


# ---- all gather --------------------------------------------------------------------------------


def gather_tokens(x: Tensor, group: TokenGroup) -> Tensor:
    """Return the tokens of all ranks: (length, *) -> (tokens, *)."""
    return _GatherTokens.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def reduce_scatter_tokens(x: Tensor, group: TokenGroup) -> Tensor:
    """Sum over ranks, and keep the tokens of this one: (tokens, *) -> (length, *).

    The parts travel in the dtype of ``x`` and are added in its accumulation dtype.
    """
    return _ReduceScatterTokens.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TokenGroup) -> Tensor:
        ctx.group = group
        longest = max(group.lengths)
        padded = x.contiguous()
        if group.local_tokens < longest:
            padded = torch.cat(
                [padded, padded.new_zeros(longest - group.local_tokens, *x.shape[1:])]
            )
        out = x.new_empty(group.size * longest, *x.shape[1:])
        dist.all_gather_single(out, padded, group.group)
        if group.total_tokens == group.size * longest:
            return out
        parts = zip(out.split(longest), group.lengths, strict=True)
        return torch.cat([part[:length] for part, length in parts])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_tokens(gradient, ctx.group), None


class _ReduceScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TokenGroup) -> Tensor:
        ctx.group = group
        parts = x.new_empty(group.size, group.local_tokens, *x.shape[1:])
        received = [group.local_tokens] * group.size
        dist.all_to_all_single(
            parts.flatten(0, 1), x.contiguous(), received, list(group.lengths), group.group
        )
        return parts.sum(0, dtype=accumulation_dtype(x.dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gather_tokens(gradient, ctx.group), None


def sum_ranks(x: Tensor, group: TokenGroup) -> Tensor:
    """Sum a tensor over ranks; every rank gets the sum, and its gradient is summed as well."""
    return _SumRanks.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


class _SumRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TokenGroup) -> Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group.group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return sum_ranks(gradient, ctx.group), None


def gather_numbers(numbers: Sequence[float], group: dist.ProcessGroup, device: Any) -> Tensor:
    """Return the numbers of each rank, (ranks, numbers), float64, on the CPU."""
    mine = torch.tensor(numbers, dtype=torch.float64, device=device)
    everyone = mine.new_empty(dist.get_world_size(group), len(numbers))
    dist.all_gather_single(everyone.view(-1), mine, group)
    return everyone.cpu()


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
        """Return the received tensors once all have arrived."""
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
