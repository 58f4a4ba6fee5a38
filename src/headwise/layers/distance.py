"""Score biases by distance: ALiBi's slopes, and T5's learned buckets.

The formulas are in `headwise.function.distance`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Unpack, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.function import distance
from headwise.function.spec import BIAS_MAX, AlibiRule, BucketRule
from headwise.layers.norm import Placement
from headwise.masks.clause import Align
from headwise.masks.score_bias import ScoreBias


@runtime_checkable
class PositionBias(Protocol):
    """Protocol of a score bias by position as an option of a layer."""

    def module(
        self,
        num_heads: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> nn.Module:
        """Make the module whose ``forward(*, align)`` returns the `ScoreBias` of these heads."""
        ...


class FixedTable(nn.Module):
    """Module with a constant tensor ``numbers``, which is not in its state_dict.

    The tensor moves with the module, but never to a dtype narrower than ``least``, which would
    round it for good. ``double()`` widens it.
    """

    numbers: Tensor

    def __init__(
        self, numbers: tuple[float, ...], *, least: torch.dtype, **place: Unpack[Placement]
    ) -> None:
        super().__init__()
        self._exact, self._least = numbers, least
        buffer = self._make_numbers(place.get("device"), place.get("dtype") or least)
        self.register_buffer("numbers", buffer, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FixedTable:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Recomputed: fn may have rounded the numbers, or left them empty (to_empty).
        self.numbers = self._make_numbers(self.numbers.device, self.numbers.dtype)
        return self

    def _make_numbers(self, device: torch.device | str | None, dtype: torch.dtype) -> Tensor:
        wide = torch.promote_types(dtype, self._least)
        return torch.tensor(self._exact, dtype=wide, device=device)


# ---- ALiBi -----------------------------------------------------------------------------------


def alibi_slopes(num_heads: int, *, bias_max: float = BIAS_MAX) -> Float[Tensor, " heads"]:
    """Return ALiBi's slope of each head, (heads,), float32.

    Args:
        num_heads: number of heads.
        bias_max: the smallest slope is ``2 ** -bias_max``; MPT's alibi_bias_max.

    Raises:
        OptionError: num_heads below 1, or a ``bias_max`` that is not positive and finite.
    """
    _require_slope_options(num_heads, bias_max)
    return torch.tensor(distance.alibi_slope_values(num_heads, bias_max), dtype=torch.float32)


@dataclass(frozen=True)
class Alibi:
    """ALiBi as an option of a layer: adds ``-slope * |key - query|``; see `alibi_slopes`.

    Its ``slopes`` are those of each head where they follow another rule.

    Raises:
        OptionError: a ``bias_max`` that is not positive and finite, or slopes of other heads.
    """

    bias_max: float = BIAS_MAX
    slopes: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _require_slope_options(1, self.bias_max)

    def module(
        self,
        num_heads: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> AlibiSlopes:
        """Make the slopes of ``num_heads`` heads, as a module without parameters."""
        return AlibiSlopes(
            num_heads, bias_max=self.bias_max, slopes=self.slopes, device=device, dtype=dtype
        )


class AlibiSlopes(FixedTable):
    """ALiBi's slopes, which move with the layer and are not in its state_dict.

    Slopes stay float32 under ``half()`` and ``bfloat16()``. For 32 heads the error of the first
    slope, 2 ** -0.25, is 0.0011 in bfloat16: a score of 4.3 at a distance of 4,096.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        bias_max: float,
        slopes: tuple[float, ...] | None = None,
        **place: Unpack[Placement],
    ) -> None:
        _require_slope_options(num_heads, bias_max)
        if slopes is not None and len(slopes) != num_heads:
            raise OptionError(
                saw=f"{len(slopes)} slopes for {num_heads} heads",
                needed="a slope for each head",
                do="leave out slopes= for those of the paper",
            )
        single = tuple(array("f", distance.alibi_slope_values(num_heads, bias_max)))
        super().__init__(slopes or single, least=torch.float32, **place)
        self.bias_max, self.slopes = bias_max, slopes

    @property
    def rule(self) -> AlibiRule:
        """The slopes, as `AttentionSpec` has them."""
        return AlibiRule(self.bias_max, slopes=self.slopes)

    def forward(self, *, align: Align | None) -> ScoreBias:
        """Return the bias ``-slope * |key - query|``."""
        return ScoreBias.alibi(self.numbers, align=align)

    def extra_repr(self) -> str:
        """Return the number of heads."""
        return f"num_heads={len(self.numbers)}"


def _require_slope_options(num_heads: int, bias_max: float) -> None:
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


# ---- T5 --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class T5Bias:
    """T5's relative position bias as an option of a layer.

    T5 does not scale its scores: construct the layer with ``scale=1.0``.

    Args:
        buckets: the number of learned numbers of each head.
        max_distance: all distances from here on share a bucket.
        bidirectional: True if half of the buckets are for later keys (T5's encoder); False if
            later keys share the bucket of distance 0 (T5's decoder, whose mask hides them).

    Raises:
        OptionError: too few buckets, an odd number of them for two directions, or a max_distance
            that leaves no distance to share a bucket.
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
                do="e.g. buckets=32, as in T5",
            )
        unshared = distance.count_unshared_distances(self.buckets, bidirectional=self.bidirectional)
        if self.max_distance <= unshared:
            raise OptionError(
                saw=f"T5Bias(buckets={self.buckets}, max_distance={self.max_distance})",
                needed=f"more than {unshared}, the number of distances with their own bucket",
                do="e.g. max_distance=128, as in T5",
            )

    def module(
        self,
        num_heads: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> T5BucketTable:
        """Make the learned table of ``num_heads`` heads, initialised to 0."""
        return T5BucketTable(self, num_heads, device=device, dtype=dtype)

    def bucket_of(self, distances: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """Return the bucket of each distance ``key - query``."""
        sides, options = self.bidirectional, (self.buckets, self.max_distance)
        return distance.bucket_of_distances(distances, *options, bidirectional=sides)


class T5BucketTable(FixedTable):
    """Learned table of T5's bias, (buckets, heads), as ``relative_attention_bias.weight``."""

    def __init__(self, options: T5Bias, num_heads: int, **place: Unpack[Placement]) -> None:
        reach = options.max_distance
        buckets = tuple(options.bucket_of(torch.arange(-reach, reach + 1, device="cpu")).tolist())
        super().__init__(buckets, least=torch.int64, device=place.get("device"))
        self.options = options
        self.relative_attention_bias = nn.Embedding(options.buckets, num_heads, **place)
        self.reset_parameters()

    @property
    def rule(self) -> BucketRule:
        """The buckets, as `AttentionSpec` has them."""
        t5 = self.options
        return BucketRule(t5.buckets, t5.max_distance, t5.bidirectional)

    def reset_parameters(self) -> None:
        """Set the table to 0."""
        nn.init.zeros_(self.relative_attention_bias.weight)

    def forward(self, *, align: Align | None) -> ScoreBias:
        """Return the bias of each distance ``key - query``, as a table by distance."""
        table: Tensor = self.relative_attention_bias(self.numbers)
        return ScoreBias.relative(table.transpose(-2, -1), align=align)

    def extra_repr(self) -> str:
        """Return the options."""
        return repr(self.options)
