"""ALiBi: a penalty that grows with distance, at a slope of its own for each head.

Press et al. 2022 (arXiv:2108.12409): of n heads, n a power of two, head h, counted from 1, has the
slope ``2 ** (-8 h / n)``. For other counts two rules were published. The paper's code
(ofirpress/attention_with_linear_biases; BLOOM, Falcon) takes the slopes of the power of two below,
then every other one of the power of two above. MPT's (mosaicml/llm-foundry) takes of the power of
two above those at even places, then those at odd places. The slopes at even places are those of
the power of two below, so both give the same slopes in the same order. MPT lets the 8 be chosen.

Falcon adds its bias before the scores are scaled, and rounds the slopes to bfloat16: in the terms
used here its slopes are smaller by the root of head_dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.errors import OptionError
from headwise.layers.positions.bias import WithNumbers
from headwise.masks.bound_mask import Align
from headwise.masks.score_bias import ScoreBias

BIAS_MAX = 8.0  # the last head's slope is 2 to the minus this


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


class AlibiSlopes(WithNumbers):
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
