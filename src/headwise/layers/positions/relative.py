"""T5's relative position bias: one learned number for each head and bucket of distances.

Near distances have a bucket each; farther ones share buckets that grow by the logarithm, and the
last bucket holds everything from ``max_distance`` on (Raffel et al. 2020, arXiv:1910.10683,
section 2.1; Mesh TensorFlow, transformer_layers.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.layers.positions.bias import WithNumbers
from headwise.masks.bound_mask import Align
from headwise.masks.score_bias import ScoreBias


@dataclass(frozen=True)
class T5Bias:
    """T5's bias as an option of a layer.

    T5 does not scale its scores: give the layer ``scale=1.0`` for its function.

    Args:
        buckets: how many numbers each head learns.
        max_distance: from here on all distances share a bucket.
        bidirectional: whether later keys have buckets of their own, half of them (T5's encoder),
            or share the bucket of distance 0 (its decoder, whose mask hides them).
    """

    buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True

    def __post_init__(self) -> None:
        sides = 2 if self.bidirectional else 1
        if self.buckets < 2 * sides or self.buckets % sides:
            raise OptionError(
                saw=f"T5Bias(buckets={self.buckets}, bidirectional={self.bidirectional})",
                needed="an even number from 4, half for each direction"
                if self.bidirectional
                else "at least 2",
                do="T5 has 32",
            )
        if self.max_distance <= self._near():
            raise OptionError(
                saw=f"T5Bias(buckets={self.buckets}, max_distance={self.max_distance})",
                needed=f"more than {self._near()}: so many distances have a bucket each",
                do="T5 has 128",
            )

    def module(
        self,
        num_heads: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> RelativeBias:
        """The learned numbers for this many heads, as a module; 0 at the start."""
        return RelativeBias(self, num_heads, device=device, dtype=dtype)

    def bucket_of(self, distances: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """The bucket of each distance ``key - query``."""
        buckets = self.buckets // 2 if self.bidirectional else self.buckets
        near = self._near()
        later = (distances > 0) * (self.buckets - buckets)
        far = distances.abs() if self.bidirectional else (-distances).clamp(min=0)
        # Float32 in this order: where a bucket begins is a matter of the last bit.
        steps = torch.log(far.clamp(min=near).float() / near) / math.log(self.max_distance / near)
        shared = (near + (steps * (buckets - near)).long()).clamp(max=buckets - 1)
        return later + torch.where(far < near, far, shared)

    def _near(self) -> int:
        """How many distances have a bucket of their own, on each side."""
        return self.buckets // (4 if self.bidirectional else 2)


class RelativeBias(WithNumbers):
    """The learned numbers, under T5's own name: ``relative_attention_bias.weight``.

    One row for each bucket, one column for each head.
    """

    def __init__(
        self,
        options: T5Bias,
        num_heads: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        reach = options.max_distance
        distances = torch.arange(-reach, reach + 1, device="cpu")
        buckets = tuple(options.bucket_of(distances).tolist())
        super().__init__(buckets, least=torch.int64, device=device)
        self.options = options
        self.relative_attention_bias = nn.Embedding(
            options.buckets, num_heads, device=device, dtype=dtype
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """No preference for any distance."""
        nn.init.zeros_(self.relative_attention_bias.weight)

    def forward(self, *, align: Align | None) -> ScoreBias:
        """The number of the bucket of ``key - query``; a table by distance, never a matrix."""
        table: Tensor = self.relative_attention_bias(self.numbers)
        return ScoreBias.relative(table.transpose(-2, -1), align=align)

    def extra_repr(self) -> str:
        """The options."""
        return repr(self.options)
