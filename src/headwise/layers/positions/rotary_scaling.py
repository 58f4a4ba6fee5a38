"""Rotary frequencies, and the ways in which they are stretched for longer texts.

The pair of channels i turns by ``frequency[i]`` radians for each token, and
``frequency[i] = theta ** (-2i / width)`` (Su et al. 2021, arXiv:2104.09864, section 3.2.2). A
scaling makes slow pairs slower, so that positions beyond the training length meet angles that
were trained.

Everything here is float32 on the CPU, operation by operation as Hugging Face computes it
(transformers, modeling_rope_utils.py), so that a converted layer turns by the same angles to the
last bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.errors import OptionError
from headwise.support.axes import describe_value


def require_positive(owner: object, *names: str) -> None:
    """Raise OptionError unless each of these fields is a positive finite number."""
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise OptionError(
                saw=f"{type(owner).__name__}({name}={describe_value(value)})",
                needed=f"{name}: a positive finite number",
                do=f"give the model's own {name}",
            )


def frequencies_of(
    theta: float, width: int, *, device: torch.device | str = "cpu"
) -> Float[Tensor, " pairs"]:
    """``theta ** (-2i / width)`` for each pair i, unscaled."""
    return 1.0 / _periods(theta, width, device)


def _periods(theta: float, width: int, device: torch.device | str) -> Tensor:
    """Tokens for one radian."""
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    return torch.pow(theta, exponents)


class _KeepsAmplitude:
    """A scaling that changes the angles alone."""

    @property
    def amplitude(self) -> float:
        """What rotated vectors are multiplied by."""
        return 1.0


@dataclass(frozen=True)
class LinearScaling(_KeepsAmplitude):
    """Every position divided by ``factor``: position interpolation (arXiv:2306.15595)."""

    factor: float

    def __post_init__(self) -> None:
        require_positive(self, "factor")

    def scale(
        self, theta: float, width: int, *, device: torch.device | str = "cpu"
    ) -> Float[Tensor, " pairs"]:
        """The scaled frequencies of ``width`` rotated channels."""
        return frequencies_of(theta, width, device=device) / self.factor


@dataclass(frozen=True)
class NTKScaling(_KeepsAmplitude):
    """A larger theta: ``theta * factor ** (width / (width - 2))``.

    It divides the slowest frequency by ``factor`` and leaves the fastest (bloc97's NTK-aware
    interpolation, as given in YaRN, arXiv:2309.00071, section 3.1).
    """

    factor: float

    def __post_init__(self) -> None:
        require_positive(self, "factor")

    def scale(
        self, theta: float, width: int, *, device: torch.device | str = "cpu"
    ) -> Float[Tensor, " pairs"]:
        """The scaled frequencies of ``width`` rotated channels.

        Raises:
            OptionError: one pair, whose frequency is 1 for every theta.
        """
        if width == 2:
            raise OptionError(
                saw=f"NTKScaling(factor={self.factor}) of a rotary width of 2",
                needed="at least two pairs: a width from 4",
                do=f"LinearScaling({self.factor})",
            )
        larger = theta * self.factor ** (width / (width - 2))
        return frequencies_of(larger, width, device=device)


@dataclass(frozen=True)
class YarnScaling:
    """Slow pairs divided by ``factor``, fast ones kept, a ramp between (YaRN, arXiv:2309.00071).

    A pair is kept where it turns more than ``beta_fast`` times within ``original_length`` tokens,
    divided where it turns less than ``beta_slow`` times. Where a softmax scale is also corrected,
    as DeepSeek's is (by the square of ``0.1 * mscale_all_dim * log(factor) + 1``), that is the
    layer's ``scale``.

    Args:
        factor: new length over original length.
        original_length: tokens of the training length.
        beta_fast, beta_slow: turns that bound the ramp.
        attention_factor: what rotated vectors are multiplied by, 0.1 * log(factor) + 1 by default.
        mscale, mscale_all_dim: where both are given and not 0, the default becomes
            (0.1 * mscale * log(factor) + 1) / (0.1 * mscale_all_dim * log(factor) + 1), as in
            DeepSeek-V2 (arXiv:2405.04434).
        truncate: the ramp begins and ends at whole pairs; gpt-oss sets False.
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
        optional = ("attention_factor",) if self.attention_factor is not None else ()
        require_positive(self, "factor", "original_length", "beta_fast", "beta_slow", *optional)
        if self.beta_fast < self.beta_slow:
            raise OptionError(
                saw=f"YarnScaling(beta_fast={self.beta_fast}, beta_slow={self.beta_slow})",
                needed="beta_fast, the number of turns above which a pair is kept, not below "
                "beta_slow, below which it is divided by the factor",
                do=f"beta_fast={self.beta_slow}, beta_slow={self.beta_fast}",
            )

    @property
    def amplitude(self) -> float:
        """What rotated vectors are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def scale(
        self, theta: float, width: int, *, device: torch.device | str = "cpu"
    ) -> Float[Tensor, " pairs"]:
        """The scaled frequencies of ``width`` rotated channels.

        Raises:
            OptionError: no pair turns as often as the ramp asks at this length.
        """
        first, last = self._ramp(theta, width)
        pairs = torch.arange(width // 2, dtype=torch.float32, device=device)
        kept = 1 - ((pairs - first) / (last - first)).clamp(0, 1)
        periods = _periods(theta, width, device)
        return 1.0 / (self.factor * periods) * (1 - kept) + 1.0 / periods * kept

    def _ramp(self, theta: float, width: int) -> tuple[float, float]:
        """The pairs between which the frequencies go from kept to divided."""
        if theta <= 1:
            raise OptionError(
                saw=f"YarnScaling with theta={theta}",
                needed="theta above 1: pairs that turn ever more slowly",
                do="e.g. theta=10000.0",
            )
        first, last = (
            self._pair(turns, theta, width) for turns in (self.beta_fast, self.beta_slow)
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
                do="give the training length in tokens, before it was stretched",
            )
        # A ramp of no length is a step.
        return first, last if first < last else last + 0.001

    def _pair(self, turns: float, theta: float, width: int) -> float:
        """Which pair, as a fraction, turns so many times within the original length."""
        return (
            width * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))
        )

    def _magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True)
class Llama3Scaling(_KeepsAmplitude):
    """Long waves divided by ``factor``, short ones kept, a blend between (Llama 3.1).

    A pair is kept where it turns more than ``high_freq_factor`` times within ``original_length``
    tokens, divided where it turns less than ``low_freq_factor`` times, and blended by its turns
    between (meta-llama/llama-models, models/llama3/model.py, apply_scaling).
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int

    def __post_init__(self) -> None:
        require_positive(self, *(field.name for field in fields(self)))
        if not self.low_freq_factor < self.high_freq_factor:
            raise OptionError(
                saw=f"Llama3Scaling(low_freq_factor={self.low_freq_factor}, "
                f"high_freq_factor={self.high_freq_factor})",
                needed="low_freq_factor below high_freq_factor",
                do="Llama 3.1 has 1.0 and 4.0",
            )

    def scale(
        self, theta: float, width: int, *, device: torch.device | str = "cpu"
    ) -> Float[Tensor, " pairs"]:
        """The scaled frequencies of ``width`` rotated channels."""
        plain = frequencies_of(theta, width, device=device)
        turns = self.original_length / (2 * math.pi / plain)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clamp(0, 1)
        return (1 - kept) * plain / self.factor + kept * plain


Scaling = LinearScaling | NTKScaling | YarnScaling | Llama3Scaling
