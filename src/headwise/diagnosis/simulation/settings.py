"""Settings of simulated attention that no tensor of weights holds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from headwise.function.scaling import LinearScaling, Llama3Scaling, NTKScaling, Scaling, YarnScaling
from headwise.layers.distance import T5Bias

Pairing = Literal["half-split", "interleaved"]


@dataclass(frozen=True)
class RotaryForm:
    """Rotary embedding with the numbers that ported code gets wrong.

    Attributes:
        theta: base of the frequencies.
        width: number of leading channels of a head that turn.
        pairing: "half-split" pairs channels i and i + span, "interleaved" 2i and 2i + 1.
        scaling: of the frequencies.
        exponent_width: pair i turns by theta ** (-2i / exponent_width); ``width`` if None.
        span: distance of the two channels of a half-split pair; half the width if None.
        attention_factor: factor of rotated channels; that of the scaling if None.
        q_offset, k_offset: added to the positions.
        dtype: to which the frequencies are rounded; None for none.
    """

    theta: float
    width: int
    pairing: Pairing = "half-split"
    scaling: Scaling | None = None
    exponent_width: int | None = None
    span: int | None = None
    attention_factor: float | None = None
    q_offset: float = 0.0
    k_offset: float = 0.0
    dtype: torch.dtype | None = None

    @property
    def amplitude(self) -> float:
        """Factor of rotated channels."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 1.0 if self.scaling is None else self.scaling.amplitude

    def frequencies(self) -> Tensor:
        """Return the angle of each pair for one token, in radians, (pairs,), float64."""
        base = self.exponent_width or self.width
        frequencies = _scaled_frequencies(self.theta, self.width, base, self.scaling)
        return frequencies if self.dtype is None else frequencies.to(self.dtype).double()

    def pair_slices(self) -> tuple[slice, slice]:
        """Return the first and the second channel of each pair."""
        count = self.width // 2
        if self.pairing == "interleaved":
            return slice(0, 2 * count, 2), slice(1, 2 * count, 2)
        span = self.span or count
        return slice(0, count), slice(span, span + count)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return (batch, heads, length, head_dim) rotated by positions (batch, length)."""
        first, second = self.pair_slices()
        return self.rotate_by_angles(
            x, positions[:, None, :, None].double() * self.frequencies(), first, second
        )

    def rotate_by_angles(self, x: Tensor, angles: Tensor, first: slice, second: slice) -> Tensor:
        """Return ``x`` with the channels of each pair turned by ``angles`` (..., pairs)."""
        cos, sin = (self.amplitude * f(angles) for f in (torch.cos, torch.sin))
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        turned = x.clone()
        turned[..., first] = x[..., first] * cos - x[..., second] * sin
        turned[..., second] = x[..., second] * cos + x[..., first] * sin
        return turned


@lru_cache(maxsize=64)  # a search rotates by the same frequencies thousands of times
def _scaled_frequencies(theta: float, width: int, base: int, scaling: Scaling | None) -> Tensor:
    exponents = 2 * torch.arange(width // 2, dtype=torch.float64) / base
    plain: Tensor = theta**-exponents
    if scaling is None or not width:  # a scaling of no pairs, which YarnScaling refuses
        return plain
    match scaling:
        case LinearScaling(factor):
            return plain / factor
        case NTKScaling() if base == 2:  # one pair, which turns by 1 for each theta
            return plain
        case NTKScaling(factor):
            larger: float = theta * factor ** (base / (base - 2))
            return larger**-exponents
        case Llama3Scaling():
            return _llama3_frequencies(plain, scaling)
        case YarnScaling():
            return _yarn_frequencies(plain, scaling.ramp_bounds(theta, width), scaling.factor)


def _llama3_frequencies(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.original_length * plain / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return kept * plain + (1 - kept) * plain / scaling.factor


def _yarn_frequencies(plain: Tensor, ramp: tuple[float, float], factor: float) -> Tensor:
    first, last = ramp
    pairs = torch.arange(len(plain), dtype=torch.float64)
    divided = ((pairs - first) / (last - first)).clamp(0, 1)
    return plain * (1 - divided) + plain / factor * divided


@dataclass(frozen=True)
class NormForm:
    """Normalisation of queries and keys with the options that ported code gets wrong.

    Attributes:
        kind: "rms" divides by the root mean square, "layer" subtracts the mean first, "l2" divides
            by the length.
        over: the channels of a "head", or the "width" of all heads.
        place: "before" or "after" the rotation.
        weight_offset: added to the stored weight.
        eps: added to the mean square.
    """

    kind: Literal["rms", "layer", "l2"] = "rms"
    over: Literal["head", "width"] = "head"
    place: Literal["before", "after"] = "before"
    weight_offset: float = 0.0
    eps: float = 1e-6

    def normalise_without_weight(self, x: Tensor) -> Tensor:
        """Return (batch, heads, length, channels) with normalised channels, without a weight."""
        axes = (1, 3) if self.over == "width" else (3,)
        if self.kind == "layer":
            x = x - x.mean(axes, keepdim=True)
        square = x.square()
        size = (
            square.sum(axes, keepdim=True) if self.kind == "l2" else square.mean(axes, keepdim=True)
        )
        return x * (size + self.eps).rsqrt()


@dataclass(frozen=True)
class Settings:
    """Sizes and settings of simulated attention.

    Attributes:
        num_heads, num_kv_heads: query heads, and heads of keys and values.
        scale: factor of q.k.
        rotary: rotation of queries and keys; None for none.
        norm: normalisation of queries and keys; None for none.
        softcap: scores become softcap * tanh(scores / softcap).
        slopes: of ALiBi, (heads,): the scores get -slope * |distance|.
        buckets: of the distances whose bias the weights hold as ``distances`` (buckets, heads).
        causal: True if a query attends to no later key, by positions.
        window: (left, right), the numbers of keys before and after; None for no bound.
    """

    num_heads: int
    num_kv_heads: int
    scale: float
    rotary: RotaryForm | None = None
    norm: NormForm | None = None
    softcap: float | None = None
    slopes: Tensor | None = None
    buckets: T5Bias | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None

    @property
    def group(self) -> int:
        """Number of query heads that share a kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The fields that are tensors."""
        return {} if self.slopes is None else {"slopes": self.slopes}

    def with_rotary(self, **changes: Any) -> Settings:
        """Return the settings with fields of the rotation changed."""
        assert self.rotary is not None
        return replace(self, rotary=replace(self.rotary, **changes))
