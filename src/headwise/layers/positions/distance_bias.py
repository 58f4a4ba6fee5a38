"""Score biases by distance: ALiBi's slopes, and T5's learned buckets.

ALiBi (Press et al. 2022, arXiv:2108.12409) is a penalty that grows with distance, at a slope of its
own for each head: of n heads, n a power of two, head h, counted from 1, has the slope
``2 ** (-8 h / n)``. For other counts two rules were published. The paper's code
(ofirpress/attention_with_linear_biases; BLOOM, Falcon) takes the slopes of the power of two below,
then every other one of the power of two above. MPT's (mosaicml/llm-foundry) takes of the power of
two above those at even places, then those at odd places. The slopes at even places are those of
the power of two below, so both give the same slopes in the same order. MPT lets the 8 be chosen.

Falcon adds its bias before the scores are scaled, and rounds the slopes to bfloat16: in the terms
used here its slopes are smaller by the root of head_dim.

T5's relative position bias is one learned number for each head and bucket of distances. Near
distances have a bucket each; farther ones share buckets that grow by the logarithm, and the last
bucket holds everything from ``max_distance`` on (Raffel et al. 2020, arXiv:1910.10683, section
2.1; Mesh TensorFlow, transformer_layers.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.masks.alignment import Align
from headwise.masks.score_bias import ScoreBias

BIAS_MAX = 8.0  # the last head's slope is 2 to the minus this


@runtime_checkable
class PositionBias(Protocol):
    """A score bias by position; its module holds what it learns, if anything."""

    def module(
        self,
        num_heads: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> nn.Module:
        """A module whose ``forward(*, align)`` gives the `ScoreBias` for this many heads."""
        ...


class FixedTable(nn.Module):
    """A module with one tensor of fixed numbers, ``numbers``, that is in no state_dict.

    It goes where the module goes, but is never narrower than ``least``: ``half()`` would round
    it for good. ``double()`` widens it, so that one function is computed in every dtype.
    """

    numbers: Tensor

    def __init__(
        self,
        numbers: tuple[float, ...] | tuple[int, ...],
        *,
        least: torch.dtype,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._exact, self._least = numbers, least
        written = self._written(device, least if dtype is None else dtype)
        self.register_buffer("numbers", written, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FixedTable:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Written anew: what fn gave is rounded, or nothing at all after to_empty().
        self.numbers = self._written(self.numbers.device, self.numbers.dtype)
        return self

    def _written(self, device: torch.device | str | None, dtype: torch.dtype) -> Tensor:
        numbers = torch.tensor(self._exact, dtype=self._least, device=device)
        return numbers.to(torch.promote_types(dtype, self._least))


# ---- ALiBi -----------------------------------------------------------------------------------


def alibi_slopes(num_heads: int, *, bias_max: float = BIAS_MAX) -> Float[Tensor, " heads"]:
    """The slope of each head, float32.

    Args:
        num_heads: how many.
        bias_max: the exponent of the smallest slope, ``2 ** -bias_max``; MPT's alibi_bias_max.

    Raises:
        OptionError: no heads, or a ``bias_max`` that is not positive and finite.
    """
    _check(num_heads, bias_max)
    return torch.tensor(_slopes(num_heads, bias_max), dtype=torch.float32)


@dataclass(frozen=True)
class Alibi:
    """ALiBi as an option of a layer; see `alibi_slopes`."""

    bias_max: float = BIAS_MAX

    def __post_init__(self) -> None:
        _check(1, self.bias_max)

    def module(
        self,
        num_heads: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> AlibiSlopes:
        """The slopes for this many heads, as a module without parameters."""
        return AlibiSlopes(num_heads, bias_max=self.bias_max, device=device, dtype=dtype)


class AlibiSlopes(FixedTable):
    """Slopes that move with the layer, and are not in its state_dict.

    They stay float32 under ``half()`` and ``bfloat16()``. Of 32 heads the first slope, 2 ** -0.25,
    would be off by 0.0011 in bfloat16: at a distance of 4,096 that is a score of 4.3.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        bias_max: float,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check(num_heads, bias_max)
        slopes = _slopes(num_heads, bias_max)
        super().__init__(slopes, least=torch.float32, device=device, dtype=dtype)
        self.bias_max = bias_max

    def forward(self, *, align: Align | None) -> ScoreBias:
        """``-slope * |key - query|``."""
        return ScoreBias.alibi(self.numbers, align=align)

    def extra_repr(self) -> str:
        """The number of heads."""
        return f"num_heads={len(self.numbers)}"


def _check(num_heads: int, bias_max: float) -> None:
    if num_heads < 1:
        raise OptionError(
            saw=f"ALiBi slopes for {num_heads} heads", needed="at least one", do="num_heads=8"
        )
    if not 0 < bias_max < math.inf:
        raise OptionError(
            saw=f"bias_max={bias_max}",
            needed="a positive finite number",
            do=f"bias_max={BIAS_MAX}, the paper's",
        )


def _slopes(num_heads: int, bias_max: float) -> tuple[float, ...]:
    # Python's own numbers: no fake tensor and no default device can come between.
    below = 2 ** (num_heads.bit_length() - 1)
    above = _geometric(2 * below, bias_max)
    return (_geometric(below, bias_max) + above[::2])[:num_heads]


def _geometric(count: int, bias_max: float) -> tuple[float, ...]:
    return tuple(2 ** (-bias_max * (head + 1) / count) for head in range(count))


# ---- T5 --------------------------------------------------------------------------------------


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
    ) -> T5BucketTable:
        """The learned numbers for this many heads, as a module; 0 at the start."""
        return T5BucketTable(self, num_heads, device=device, dtype=dtype)

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


class T5BucketTable(FixedTable):
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
