"""Calls of a layer with their recorded stages, in float64.

The stages are those of `headwise.function.stages`. q, k, v and head outputs are (batch, heads,
length, channels), keys and values with their own number of heads, and keys without those of earlier
calls; scores and weights are (batch, heads, queries, keys); the output is (batch, queries,
out_dim). A hidden key has a score of -inf.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

Stages = Mapping[str, Tensor]


@dataclass(frozen=True)
class Inputs:
    """Arguments of one call of a layer, or of several calls with one cache.

    Attributes:
        x: (batch, queries, embed_dim).
        source: (batch, keys, source_dim) in cross attention; None where keys come from ``x``.
        mask: broadcasts to (batch, heads, queries, keys); True attends.
        positions: of the queries, (batch, queries); None to count from the keys of earlier calls.
        steps: lengths of the calls with one cache in which the tokens come; () for a single call.
    """

    x: Tensor
    source: Tensor | None = None
    mask: Tensor | None = None
    positions: Tensor | None = None
    steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.mask is not None and self.mask.dim() < 4:
            mask = self.mask[(None,) * (4 - self.mask.dim())]
            object.__setattr__(self, "mask", mask)

    @property
    def per_call(self) -> list[Inputs]:
        """The inputs of each call."""
        if not self.steps:
            return [self]
        calls = []
        for start, end in pairwise(accumulate(self.steps, initial=0)):
            mask, positions = self.mask, self.positions
            if mask is not None:
                rows = mask[..., start:end, :] if mask.shape[-2] > 1 else mask
                mask = rows[..., :end]
            positions = None if positions is None else positions[:, start:end]
            calls.append(Inputs(self.x[:, start:end], mask=mask, positions=positions))
        return calls

    @property
    def key_source(self) -> Tensor:
        """The input of keys and values."""
        return self.x if self.source is None else self.source


@dataclass(frozen=True)
class RecordedCall:
    """Stages of one call, as far as they were recorded, in float64."""

    inputs: Inputs
    stages: Stages  # by name
    dtype: torch.dtype = torch.float64  # of the arithmetic that was recorded
    # Calls with the same cache before this one; their keys are keys of this call.
    earlier: tuple[RecordedCall, ...] = field(default=(), repr=False)
    # The same object in all copies of the call, also in those whose numbers were changed.
    key: object = field(default_factory=object, repr=False, compare=False)

    @property
    def past_key_count(self) -> int:
        """Number of keys of earlier calls."""
        return sum([call.inputs.x.shape[1] for call in self.earlier]) if self.earlier else 0

    @property
    def query_positions(self) -> Tensor:
        """Positions of the queries, (batch, queries)."""
        if self.inputs.positions is not None:
            return self.inputs.positions
        return count_positions(self.past_key_count, *self.inputs.x.shape[:2])

    @property
    def new_key_positions(self) -> Tensor:
        """Positions of the keys of this call, (batch, keys)."""
        if self.inputs.source is None:
            return self.query_positions
        return count_positions(0, *self.inputs.source.shape[:2])

    @property
    def key_positions(self) -> Tensor:
        """Positions of all keys, those of earlier calls first, (batch, keys)."""
        earlier = [call.new_key_positions for call in self.earlier]
        return join_positions(*earlier, self.new_key_positions)

    def cast(self, dtype: torch.dtype) -> RecordedCall:
        """Return the call with inputs and stages in a dtype."""
        source = self.inputs.source
        return replace(
            self,
            inputs=replace(
                self.inputs,
                x=self.inputs.x.to(dtype),
                source=None if source is None else source.to(dtype),
            ),
            stages={stage: x.to(dtype) for stage, x in self.stages.items()},
            earlier=tuple(call.cast(dtype) for call in self.earlier),
        )

    def with_stages(self, stages: Stages) -> RecordedCall:
        """Return the call with other stages."""
        return replace(self, stages=stages)


# The same tensors each time, so that a model's memory finds what was computed with them.


@lru_cache(maxsize=256)
def count_positions(start: int, batch: int, length: int) -> Tensor:
    """Return the positions of tokens that follow ``start`` others, (batch, length)."""
    return torch.arange(start, start + length).expand(batch, length)


@lru_cache(maxsize=256)
def join_positions(*parts: Tensor) -> Tensor:
    """Return the positions of several calls, (batch, keys)."""
    return torch.cat(parts, 1)


@lru_cache(maxsize=64)
def subtract_positions(keys: Tensor, queries: Tensor) -> Tensor:
    """Return positions of keys less those of queries, (batch, 1, queries, keys)."""
    return (keys[:, None] - queries[..., None])[:, None]
