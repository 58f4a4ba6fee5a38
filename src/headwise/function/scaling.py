"""Rotary frequencies and their scaling for longer contexts.

Pair i turns by ``frequency[i] = theta ** (-2i / width)`` radians for each token (Su et al. 2021,
arXiv:2104.09864, section 3.2.2). A scaling lowers low frequencies, so that positions beyond the
training length get angles within the trained range.

Layers use float32 on the CPU with the operations of Hugging Face (transformers,
modeling_rope_utils.py), so that a converted layer has the same angles to the last bit.
``exponent_width`` is the width in the exponent, where code divides by another one than it rotates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TypedDict, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.errors import OptionError
from headwise.support.text import describe_value


def require_positive_fields(owner: object, *names: str) -> None:
    """Raise OptionError unless each of these fields is a positive finite number."""
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise OptionError(
                saw=f"{type(owner).__name__}({name}={describe_value(value)})",
                needed=f"{name}: a positive finite number",
                do=f"pass the {name} of the model's config",
            )


class Arithmetic(TypedDict, total=False):
    """Device, dtype and exponent_width of a computation of frequencies, and a sequence's length."""

    device: torch.device | str
    dtype: torch.dtype
    exponent_width: int | None
    length: Tensor | None  # in tokens; scalings by it return (*its shape, pairs)


def unscaled_frequencies(
    theta: float, width: int, **arithmetic: Unpack[Arithmetic]
) -> Float[Tensor, " pairs"]:
    """Return the unscaled frequency ``theta ** (-2i / width)`` of each pair i."""
    return 1.0 / _tokens_per_radian(theta, width, **arithmetic)


def _tokens_per_radian(
    theta: float,
    width: int,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    exponent_width: int | None = None,
    length: Tensor | None = None,
) -> Tensor:
    """Return the number of tokens for one radian, for each pair, whatever the length is."""
    del length
    exponents = torch.arange(0, width, 2, dtype=dtype, device=device) / (exponent_width or width)
    return torch.pow(theta, exponents)


class _Scaling:
    """Scaling of angles alone, the same at each length."""

    depends_on_length = False

    @property
    def amplitude(self) -> float:
        """Factor of rotated vectors."""
        return 1.0


@dataclass(frozen=True)
class LinearScaling(_Scaling):
    """Position interpolation: all frequencies divided by ``factor`` (arXiv:2306.15595)."""

    factor: float

    def __post_init__(self) -> None:
        require_positive_fields(self, "factor")

    def scaled_frequencies(
        self, theta: float, width: int, **arithmetic: Unpack[Arithmetic]
    ) -> Float[Tensor, " pairs"]:
        """Return the scaled frequencies of ``width`` rotated channels."""
        return unscaled_frequencies(theta, width, **arithmetic) / self.factor


@dataclass(frozen=True)
class NTKScaling(_Scaling):
    """NTK-aware interpolation: theta becomes ``theta * factor ** (width / (width - 2))``.

    The lowest frequency is divided by ``factor``, the highest is unchanged (bloc97; YaRN,
    arXiv:2309.00071, section 3.1).
    """

    factor: float

    def __post_init__(self) -> None:
        require_positive_fields(self, "factor")

    def scaled_frequencies(
        self, theta: float, width: int, **arithmetic: Unpack[Arithmetic]
    ) -> Float[Tensor, " pairs"]:
        """Return the scaled frequencies of ``width`` rotated channels.

        Raises:
            OptionError: a width of 2, whose only frequency is 1 for every theta.
        """
        base = arithmetic.get("exponent_width") or width
        if base == 2:
            raise OptionError(
                saw=f"NTKScaling(factor={self.factor}) of a rotary width of 2",
                needed="at least two pairs: a width from 4",
                do=f"LinearScaling({self.factor})",
            )
        larger = theta * self.factor ** (base / (base - 2))
        return unscaled_frequencies(larger, width, **arithmetic)


def yarn_magnitude(factor: float, mscale: float) -> float:
    """Return ``0.1 * mscale * log(factor) + 1``; 1 for a factor up to 1.

    The square of that of mscale_all_dim is a factor of DeepSeek's scores, in the layer's scale.
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class YarnScaling(_Scaling):
    """YaRN: low frequencies divided by ``factor``, high ones unchanged (arXiv:2309.00071).

    Frequencies of more than ``beta_fast`` full turns within ``original_length`` tokens are
    unchanged, those of less than ``beta_slow`` are divided, and between them lies a linear ramp.
    DeepSeek's correction of the softmax scale, the square of
    ``0.1 * mscale_all_dim * log(factor) + 1``, belongs to the layer's ``scale``.

    Args:
        factor: new length over original length.
        original_length: the training length in tokens.
        beta_fast: number of turns at the end of the ramp where frequencies stay unchanged.
        beta_slow: number of turns at the end of the ramp where frequencies are divided.
        attention_factor: factor of rotated vectors, 0.1 * log(factor) + 1 by default.
        mscale: with ``mscale_all_dim``, where neither is 0, the attention_factor becomes
            (0.1 * mscale * log(factor) + 1) / (0.1 * mscale_all_dim * log(factor) + 1) by
            default, as in DeepSeek-V2 (arXiv:2405.04434).
        mscale_all_dim: see ``mscale``.
        truncate: True if the ramp begins and ends at whole pairs; gpt-oss sets False.

    Raises:
        OptionError: a number that is not positive and finite, or beta_fast below beta_slow.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        names = ("factor", "original_length", "beta_fast", "beta_slow")
        optional = ("attention_factor",) if self.attention_factor is not None else ()
        require_positive_fields(self, *names, *optional)
        if self.beta_fast < self.beta_slow:
            raise OptionError(
                saw=f"YarnScaling(beta_fast={self.beta_fast}, beta_slow={self.beta_slow})",
                needed="beta_fast not below beta_slow: pairs with more turns than beta_fast are "
                "unchanged, pairs with less than beta_slow are divided by the factor",
                do=f"beta_fast={self.beta_slow}, beta_slow={self.beta_fast}",
            )

    @property
    def amplitude(self) -> float:
        """Factor of rotated vectors."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            whole = yarn_magnitude(self.factor, self.mscale_all_dim)
            return yarn_magnitude(self.factor, self.mscale) / whole
        return yarn_magnitude(self.factor, 1.0)

    def scaled_frequencies(
        self, theta: float, width: int, **arithmetic: Unpack[Arithmetic]
    ) -> Float[Tensor, " pairs"]:
        """Return the scaled frequencies of ``width`` rotated channels.

        Raises:
            OptionError: theta up to 1, or an original_length in which no pair is on the ramp.
        """
        first, last = self.ramp_bounds(theta, width)
        periods = _tokens_per_radian(theta, width, **arithmetic)
        pairs = torch.arange(len(periods), dtype=periods.dtype, device=periods.device)
        unscaled = 1 - ((pairs - first) / (last - first)).clamp(0, 1)
        return 1.0 / (self.factor * periods) * (1 - unscaled) + 1.0 / periods * unscaled

    def ramp_bounds(self, theta: float, width: int) -> tuple[float, float]:
        """Return the last unchanged pair and the first divided one, as floats."""
        if theta <= 1:
            raise OptionError(
                saw=f"YarnScaling with theta={theta}",
                needed="theta above 1, for decreasing frequencies",
                do="e.g. theta=10000.0",
            )
        # The index, a float, of the pair with this many turns in the original length.
        first, last = (
            width * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            first, last = float(math.floor(first)), float(math.ceil(last))
        first, last = max(first, 0.0), min(last, width - 1.0)
        if first > last:
            raise OptionError(
                saw=f"YarnScaling(original_length={self.original_length}) with theta={theta} "
                f"and a rotary width of {width}",
                needed=f"a length in which some of the {width // 2} pairs turn "
                f"{self.beta_slow} to {self.beta_fast} times",
                do="pass the training length in tokens, before the extension",
            )
        # A ramp of no length is a step.
        return first, last if first < last else last + 0.001


@dataclass(frozen=True)
class Llama3Scaling(_Scaling):
    """Scaling of Llama 3.1: low frequencies divided by ``factor``, high ones unchanged.

    Frequencies of more than ``high_freq_factor`` full turns within ``original_length`` tokens are
    unchanged, those of less than ``low_freq_factor`` are divided, and those between are blended
    (meta-llama/llama-models, models/llama3/model.py, apply_scaling).

    Raises:
        OptionError: a number that is not positive and finite, or factors in the wrong order.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int

    def __post_init__(self) -> None:
        require_positive_fields(self, *(field.name for field in fields(self)))
        if not self.low_freq_factor < self.high_freq_factor:
            raise OptionError(
                saw=f"Llama3Scaling(low_freq_factor={self.low_freq_factor}, "
                f"high_freq_factor={self.high_freq_factor})",
                needed="low_freq_factor below high_freq_factor",
                do="e.g. low_freq_factor=1.0, high_freq_factor=4.0, as in Llama 3.1",
            )

    def scaled_frequencies(
        self, theta: float, width: int, **arithmetic: Unpack[Arithmetic]
    ) -> Float[Tensor, " pairs"]:
        """Return the scaled frequencies of ``width`` rotated channels."""
        plain = unscaled_frequencies(theta, width, **arithmetic)
        turns = self.original_length / (2 * math.pi / plain)
        unscaled = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        unscaled = unscaled.clamp(0, 1)
        return (1 - unscaled) * plain / self.factor + unscaled * plain


class ByLength(_Scaling):
    """Scaling that changes with the number of tokens of a sequence, beyond ``original_length``."""

    depends_on_length = True
    original_length: int

    def are_kept(self, before: Tensor, after: Tensor) -> Tensor:
        """Return True where sequences of ``before`` tokens have the frequencies of ``after``."""
        are_short = after <= self.original_length
        return are_short | (before == 0) | (before == after)


@dataclass(frozen=True)
class LongScaling(ByLength):
    """LongRoPE: each frequency divided by a factor of its own (arXiv:2402.13753).

    A sequence of more than ``original_length`` tokens takes the long factors, each of its tokens
    included; a shorter one the short factors. Phi-3 has them. transformers chooses for all
    sequences of a batch by the longest; here each has its own.

    Args:
        short_factors: of each pair, for short sequences.
        long_factors: of each pair, for long ones.
        original_length: the training length in tokens.
        factor: new length over original length, which decides the attention_factor.
        attention_factor: factor of rotated vectors, sqrt(1 + log(factor) / log(original_length))
            by default, 1 for a factor up to 1.

    Raises:
        OptionError: a number that is not positive and finite, or lists of two lengths.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_length: int
    factor: float
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        optional = ("attention_factor",) if self.attention_factor is not None else ()
        require_positive_fields(self, "original_length", "factor", *optional)
        counts = len(self.short_factors), len(self.long_factors)
        if len({*counts}) > 1 or min(*self.short_factors, *self.long_factors) <= 0:
            raise OptionError(
                saw=f"LongScaling of {counts[0]} short_factors and {counts[1]} long_factors",
                needed="a positive factor of each pair in both",
                do="pass short_factor and long_factor of the model's config as tuples",
            )

    @property
    def amplitude(self) -> float:
        """Factor of rotated vectors."""
        if self.attention_factor is not None:
            return self.attention_factor
        grown = math.log(self.factor) / math.log(self.original_length)
        return math.sqrt(1 + grown) if self.factor > 1 else 1.0

    def are_kept(self, before: Tensor, after: Tensor) -> Tensor:
        """Return True where sequences of ``before`` tokens have the frequencies of ``after``."""
        return super().are_kept(before, after) | (before > self.original_length)

    def scaled_frequencies(
        self, theta: float, width: int, **arithmetic: Unpack[Arithmetic]
    ) -> Float[Tensor, "*batch pairs"]:
        """Return the frequencies of ``width`` rotated channels, short ones without a length.

        Raises:
            OptionError: factors for another number of pairs.
        """
        periods = _tokens_per_radian(theta, width, **arithmetic)
        if len(periods) != len(self.short_factors):
            raise OptionError(
                saw=f"LongScaling with {len(self.short_factors)} factors of a rotary width of "
                f"{width}",
                needed=f"{len(periods)} factors, one of each pair",
                do="pass those of the model's config",
            )
        short, long = (periods.new_tensor(x) for x in (self.short_factors, self.long_factors))
        length = arithmetic.get("length")
        if length is None:
            return 1.0 / (short * periods)
        return 1.0 / (torch.where(length[..., None] > self.original_length, long, short) * periods)


@dataclass(frozen=True)
class DynamicScaling(ByLength):
    """Dynamic NTK: theta grows with the length l of a sequence beyond ``original_length``, m.

    It becomes ``theta * (factor * l / m - (factor - 1)) ** (width / (width - 2))`` (transformers,
    modeling_rope_utils.py). Short sequences are not scaled.
    """

    factor: float
    original_length: int

    def __post_init__(self) -> None:
        require_positive_fields(self, "factor", "original_length")

    def scaled_frequencies(
        self, theta: float, width: int, **arithmetic: Unpack[Arithmetic]
    ) -> Float[Tensor, "*batch pairs"]:
        """Return the frequencies of ``width`` rotated channels, unscaled ones without a length."""
        length, base = arithmetic.get("length"), arithmetic.get("exponent_width") or width
        unscaled = unscaled_frequencies(theta, width, **arithmetic)
        if length is None or base == 2:
            return unscaled
        share = length.double().clamp(min=self.original_length) / self.original_length
        grown = theta * (self.factor * share - (self.factor - 1)) ** (base / (base - 2))
        exponents = torch.arange(0, width, 2, dtype=unscaled.dtype, device=unscaled.device) / base
        return 1.0 / torch.pow(grown.to(unscaled)[..., None], exponents)


@dataclass(frozen=True)
class ProportionalScaling(_Scaling):
    """Only the first ``share`` of the pairs turns, by ``theta ** (-2i / width)`` each; Gemma 4.

    The others have a frequency of 0, so that the two channels of a pair lie as far apart as in a
    rotation of the whole width. All are divided by ``factor``.

    Raises:
        OptionError: numbers that are not positive and finite, or a share above 1.
    """

    share: float
    factor: float = 1.0

    def __post_init__(self) -> None:
        require_positive_fields(self, "share", "factor")
        if self.share > 1:
            raise OptionError(
                saw=f"ProportionalScaling(share={self.share})",
                needed="a share of the pairs, from 0 to 1",
                do="pass partial_rotary_factor of the model's config",
            )

    def scaled_frequencies(
        self, theta: float, width: int, **arithmetic: Unpack[Arithmetic]
    ) -> Float[Tensor, " pairs"]:
        """Return the frequencies of ``width`` channels, 0 for the pairs that do not turn."""
        frequencies = unscaled_frequencies(theta, width, **arithmetic) / self.factor
        frequencies[int(self.share * width // 2) :] = 0.0
        return frequencies


Scaling = (
    LinearScaling
    | NTKScaling
    | YarnScaling
    | Llama3Scaling
    | LongScaling
    | DynamicScaling
    | ProportionalScaling
)
