"""Layout of a sequence over ranks: which positions each rank holds, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import SupportsIndex

import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headwise.errors import OptionError, ShapeError
from headwise.masks.clause import Span
from headwise.sharding import collectives
from headwise.sharding.agreement import require_mesh
from headwise.support.arguments import require_tensors
from headwise.support.tensors import convert_to_int_or_none
from headwise.support.text import describe_value

TOKENS = -2  # axis of (batch, heads, tokens, head_dim) and of (batch, tokens, embed_dim)


@dataclass(frozen=True)
class SequenceLayout:
    """The positions of a sequence that each rank holds.

    Make one with `contiguous`, `zigzag` or `of_lengths`. Ranks may hold different numbers of
    tokens, and none where there are fewer tokens than ranks.

    Attributes:
        spans: for each rank its runs [first, stop) of positions, in the order of its tokens.
    """

    spans: tuple[tuple[Span, ...], ...]

    @classmethod
    def contiguous(cls, length: SupportsIndex, ranks: SupportsIndex) -> SequenceLayout:
        """Give each rank one run of positions, as `torch.tensor_split` does.

        The first ranks hold one token more where the length is no multiple of ``ranks``.

        Raises:
            OptionError: a negative length, or no ranks.
        """
        chunks = _divide_chunks(*_require_counts(length, ranks), times=1)
        return cls(tuple(_join_runs([chunk]) for chunk in chunks))

    @classmethod
    def zigzag(cls, length: SupportsIndex, ranks: SupportsIndex) -> SequenceLayout:
        """Give rank r the chunks r and 2 ranks - 1 - r of 2 ranks chunks.

        Under a causal mask an early chunk has few keys and a late one many, so that all ranks have
        nearly the same work.

        Raises:
            OptionError: a negative length, or no ranks.
        """
        chunks = _divide_chunks(*_require_counts(length, ranks), times=2)
        pairs = zip(chunks, reversed(chunks), strict=True)
        return cls(tuple(_join_runs(pair) for pair, _ in zip(pairs, chunks[::2], strict=False)))

    @classmethod
    def of_lengths(cls, lengths: Sequence[SupportsIndex]) -> SequenceLayout:
        """Give rank r one run of ``lengths[r]`` positions, behind those of the ranks before it.

        Raises:
            OptionError: lengths that are no numbers from 0.
        """
        counts = [convert_to_int_or_none(length) for length in lengths]
        numbers = [count for count in counts if count is not None and count >= 0]
        if len(numbers) != len(counts) or not counts:
            raise OptionError(
                saw=f"SequenceLayout.of_lengths({describe_value(lengths)})",
                needed="for each rank the number of its tokens, from 0",
                do="e.g. SequenceLayout.of_lengths([16, 16, 13])",
            )
        return cls(tuple(_join_runs([chunk]) for chunk in _make_spans(numbers)))

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.spans)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each rank."""
        return tuple(sum(span.size for span in runs) for runs in self.spans)

    @property
    def length(self) -> int:
        """Number of tokens of the whole sequence."""
        return sum(self.lengths)

    @property
    def is_in_order(self) -> bool:
        """True if the tokens of all ranks, one rank after the other, are the sequence."""
        runs = [span for runs in self.spans for span in runs]
        return runs == sorted(runs)

    def positions(
        self, rank: int, *, device: torch.device | str | None = None
    ) -> Int[Tensor, " length"]:
        """Return the positions of a rank's tokens in the sequence, for rotary embeddings."""
        runs = [torch.arange(*span, device=device) for span in self.spans[rank]]
        return torch.cat([torch.arange(0, device=device), *runs])

    def split(
        self, x: Shaped[Tensor, "..."], rank: int, *, dim: int = TOKENS
    ) -> Shaped[Tensor, "..."]:
        """Return the tokens of one rank, of a tensor of the whole sequence.

        Args:
            x: the whole sequence; (batch, heads, tokens, head_dim) or (batch, tokens, embed_dim).
            rank: ``mesh.get_local_rank()`` for this one.
            dim: the axis of tokens; -1 for token ids (batch, tokens).

        Raises:
            ShapeError: another number of tokens.
        """
        self._require_tokens_on_axis(x, dim, self.length, "the whole sequence")
        parts = [x.narrow(dim, span.first, span.size) for span in self.spans[rank]]
        return torch.cat([x.narrow(dim, 0, 0), *parts], dim) if len(parts) != 1 else parts[0]

    def gather(
        self, x: Shaped[Tensor, "..."], mesh: DeviceMesh, *, dim: int = TOKENS
    ) -> Shaped[Tensor, "..."]:
        """Return the whole sequence on every rank: a collective, differentiable.

        Args:
            x: the tokens of this rank.
            mesh: a mesh of one dimension with all ranks of the layout.
            dim: the axis of tokens.

        Raises:
            OptionError: a mesh that does not fit.
            ShapeError: another number of tokens than the layout gives this rank.
        """
        call = "SequenceLayout.gather(x, mesh)"
        require_mesh(mesh, call)
        if mesh.size() != self.ranks:
            raise OptionError(
                saw=f"{call} with a layout over {self.ranks} ranks and a mesh of {mesh.size()}",
                needed="as many ranks in both",
                do=f"e.g. SequenceLayout.contiguous({self.length}, {mesh.size()})",
            )
        tokens = SharedTokens(mesh.get_group(), self.lengths, self)
        self._require_tokens_on_axis(x, dim, tokens.local_tokens, f"rank {tokens.rank}")
        return tokens.gather(x, dim=dim)

    # ---- for the ways of attention ----------------------------------------------------------

    def to_sequence_order(self, x: Tensor, *, dim: int) -> Tensor:
        """Return the sequence, of a tensor with the tokens of one rank after the other."""
        if self.is_in_order:
            return x
        runs = [span for runs in self.spans for span in runs]
        parts = zip(runs, x.split([span.size for span in runs], dim), strict=True)
        return torch.cat([part for _, part in sorted(parts, key=lambda pair: pair[0])], dim)

    def to_rank_order(self, x: Tensor, *, dim: int) -> Tensor:
        """Return the tokens of one rank after the other: the inverse of `to_sequence_order`."""
        if self.is_in_order:
            return x
        runs = [span for runs in self.spans for span in runs]
        order = sorted(runs)
        parts = dict(zip(order, x.split([span.size for span in order], dim), strict=True))
        return torch.cat([parts[span] for span in runs], dim)

    def _require_tokens_on_axis(self, x: Tensor, dim: int, length: int, holder: str) -> None:
        require_tensors(x=x)
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != length:
            raise ShapeError(
                saw=f"a tensor of shape {tuple(x.shape)}, with the axis of tokens at dim={dim}",
                needed=f"{length} tokens: {holder} of {self}",
                do="name the axis of tokens, e.g. dim=1, or make a layout of this length",
            )

    def __str__(self) -> str:
        return f"a layout of {self.length} tokens over {self.ranks} ranks {list(self.lengths)}"


@dataclass(frozen=True)
class SharedTokens(collectives.TokenGroup):
    """Tokens of a sequence, (batch, heads, tokens, width), that ranks share by a layout."""

    layout: SequenceLayout

    @property
    def runs(self) -> tuple[Span, ...]:
        return self.layout.spans[self.rank]

    def gather(self, x: Tensor, *, dim: int = 2) -> Tensor:
        tokens_first = collectives.exchange(collectives.WHOLE, x.movedim(dim, 0), self)
        return self.layout.to_sequence_order(tokens_first, dim=0).movedim(0, dim)

    def exchange_for_heads(self, x: Tensor) -> Tensor:
        """Return some heads of the whole sequence, (batch, heads/n, tokens, width)."""
        tokens_first = collectives.exchange(collectives.HEADS, x.permute(2, 0, 1, 3), self)
        return self.layout.to_sequence_order(tokens_first, dim=0).permute(1, 2, 0, 3)

    def exchange_for_tokens(self, x: Tensor) -> Tensor:
        """Return all heads of this rank's tokens: the inverse of `exchange_for_heads`."""
        tokens_first = self.layout.to_rank_order(x.permute(2, 0, 1, 3), dim=0)
        return collectives.exchange(collectives.TOKENS, tokens_first, self).permute(1, 2, 0, 3)

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Sum (batch, heads, tokens, *) of the whole sequence; keep the tokens of this rank."""
        tokens_first = self.layout.to_rank_order(x.movedim(2, 0), dim=0)
        return collectives.exchange(collectives.SUMS, tokens_first, self).movedim(0, 2)


def _require_counts(length: SupportsIndex, ranks: SupportsIndex) -> tuple[int, int]:
    tokens, count = convert_to_int_or_none(length), convert_to_int_or_none(ranks)
    if tokens is None or count is None or tokens < 0 or count < 1:
        raise OptionError(
            saw=f"a layout of {describe_value(length)} tokens over {describe_value(ranks)} ranks",
            needed="a number of tokens from 0, and of ranks from 1",
            do="e.g. SequenceLayout.zigzag(4096, mesh.size())",
        )
    return tokens, count


def _divide_chunks(length: int, ranks: int, *, times: int) -> list[Span]:
    """Return ``times`` chunks for each rank; the first ones are one longer where needed."""
    each, more = divmod(length, ranks * times)
    return _make_spans([each + (index < more) for index in range(ranks * times)])


def _make_spans(sizes: Sequence[int]) -> list[Span]:
    return [Span(*ends) for ends in pairwise(accumulate(sizes, initial=0))]


def _join_runs(chunks: Sequence[Span]) -> tuple[Span, ...]:
    runs: list[Span] = []
    for chunk in chunks:
        if runs and runs[-1].stop == chunk.first:
            runs[-1] = Span(runs[-1].first, chunk.stop)
        elif chunk.size:
            runs.append(chunk)
    return tuple(runs)
