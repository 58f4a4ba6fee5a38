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
    """Device, dtype and exponent_width of a computation of frequencies."""

    device: torch.device | str
    dtype: torch.dtype
    exponent_width: int | None


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
) -> Tensor:
    """Return the number of tokens for one radian, for each pair."""
    exponents = torch.arange(0, width, 2, dtype=dtype, device=device) / (exponent_width or width)
    return torch.pow(theta, exponents)


class _UnitAmplitude:
    """Scaling of angles alone."""

    @property
    def amplitude(self) -> float:
        """Factor of rotated vectors."""
        return 1.0


@dataclass(frozen=True)
class LinearScaling(_UnitAmplitude):
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
class NTKScaling(_UnitAmplitude):
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
class YarnScaling:
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
class Llama3Scaling(_UnitAmplitude):
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


Scaling = LinearScaling | NTKScaling | YarnScaling | Llama3Scaling
