"""Projections in eight-bit integers, and the bound of their error.

Quantisation rounds a number to a multiple of ``step``, so the number changes by at most half a
step. With steps s_x, s_w and s_y for inputs, weights and outputs,

    |error of output o| <= s_x / 2 * sum |w_oi| + s_w / 2 * sum |x_i| + n * s_x * s_w / 4 + s_y / 2

where both sums run over the n inputs i. The error of each product is at most
|x| * s_w / 2 + |w| * s_x / 2 + s_x * s_w / 4, the sum of integers is exact, and the output is
rounded once more. The bias may also be an integer, in steps of s_x * s_w. A range that ends
between two steps loses at most half a step at its end.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

# Inputs use half of the 256 values of quint8, as torch does by default on x86: with all values, the
# sum of two products would overflow the sixteen bits of older processors.
INPUT_LEVELS, OUTPUT_LEVELS, WEIGHT_LEVELS = 127, 255, 254


@dataclass(frozen=True)
class QuantisedRange:
    """Evenly spaced numbers, ``step`` apart; ``zero`` of them are below 0."""

    step: float
    zero: int

    @classmethod
    def from_values(cls, x: Tensor, *, levels: int) -> QuantisedRange:
        """Return a range of ``levels`` steps that covers 0 and all numbers of ``x``."""
        low, high = (float(end) for end in x.detach().aminmax())
        low, high = min(low, 0.0), max(high, 0.0)
        step = (high - low) / levels
        return cls(step, round(-low / step))


def quantise_weight(weight: Float[Tensor, "out_features in_features"]) -> Tensor:
    """Quantise a weight to qint8, symmetric around 0."""
    step = 2 * float(weight.detach().abs().max()) / WEIGHT_LEVELS
    return torch.quantize_per_tensor(weight.detach(), step, 0, torch.qint8)


class StaticQuantised(nn.Module):
    """A projection in int8 with fixed input and output ranges; its input and output are floats.

    Args:
        projection: the projection in floats.
        x: sample inputs, which determine the ranges.
        packs_every_call: True to pack the weights into the kernel's order at every call, as
            ``torch.ao.nn.quantized.functional.linear`` does; False to pack them once.
    """

    def __init__(self, projection: nn.Linear, x: Tensor, *, packs_every_call: bool) -> None:
        super().__init__()
        self.input_range = QuantisedRange.from_values(x, levels=INPUT_LEVELS)
        self.output_range = QuantisedRange.from_values(projection(x), levels=OUTPUT_LEVELS)
        self.weight, self.bias = quantise_weight(projection.weight), projection.bias.detach()
        self.packed = None if packs_every_call else self._make_packed_linear(projection)

    def forward(self, x: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch out"]:
        """(..., in_features) to (..., out_features)."""
        stored = torch.quantize_per_tensor(
            x, self.input_range.step, self.input_range.zero, torch.quint8
        )
        if self.packed is None:
            output = torch.ao.nn.quantized.functional.linear(
                stored, self.weight, self.bias, self.output_range.step, self.output_range.zero
            )
        else:
            output = self.packed(stored)
        return output.dequantize()

    def _make_packed_linear(self, projection: nn.Linear) -> nn.Module:
        packed = torch.ao.nn.quantized.Linear(projection.in_features, projection.out_features)
        packed.set_weight_bias(self.weight, self.bias)
        packed.scale, packed.zero_point = self.output_range.step, self.output_range.zero
        return packed


def quantise_dynamically(projection: nn.Linear) -> nn.Module:
    """Return a projection with packed int8 weights; torch chooses the input range at every call."""
    linear = torch.ao.nn.quantized.dynamic.Linear(projection.in_features, projection.out_features)
    linear.set_weight_bias(quantise_weight(projection.weight), projection.bias.detach())
    return linear


class BFloat16Projection(nn.Module):
    """A projection in bfloat16; its input and output are float32."""

    def __init__(self, projection: nn.Linear) -> None:
        super().__init__()
        self.weight = projection.weight.detach().bfloat16()
        self.bias = projection.bias.detach().bfloat16()

    def forward(self, x: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch out"]:
        """(..., in_features) to (..., out_features)."""
        return nn.functional.linear(x.bfloat16(), self.weight, self.bias).float()


@torch.no_grad()
def error_bound(
    projection: nn.Linear, x: Float[Tensor, "*batch in_features"], *, stores_output: bool
) -> Float[Tensor, "*batch out"]:
    """Return the largest possible error of each output, by the formula of this module."""
    weight, wide = projection.weight.detach().double(), x.double()
    of_x, of_weight, of_output = _input_weight_and_output_steps(projection, x, stores_output)
    ones = torch.ones_like
    by_inputs = of_x / 2 * nn.functional.linear(ones(wide), weight.abs())
    by_weights = of_weight / 2 * nn.functional.linear(wide.abs(), ones(weight))
    both = (projection.in_features / 4 + 1 / 2) * of_x * of_weight
    return by_inputs + by_weights + both + of_output / 2


@torch.no_grad()
def expected_error(
    projection: nn.Linear, x: Float[Tensor, "*batch in_features"], *, stores_output: bool
) -> float:
    """Return the root mean square of the error if all roundings are independent.

    The root mean square of one rounding is step / sqrt(12).
    """
    weight, wide = projection.weight.detach().double(), x.double()
    of_x, of_weight, of_output = _input_weight_and_output_steps(projection, x, stores_output)
    by_inputs = of_x**2 * float((weight**2).sum(1).mean())
    by_weights = of_weight**2 * float((wide**2).sum(-1).mean())
    return float(((by_inputs + by_weights + of_output**2) / 12) ** 0.5)


def _input_weight_and_output_steps(
    projection: nn.Linear, x: Tensor, stores_output: bool
) -> tuple[float, float, float]:
    """Return the step sizes of inputs, weights and outputs."""
    return (
        QuantisedRange.from_values(x, levels=INPUT_LEVELS).step,
        2 * float(projection.weight.detach().abs().max()) / WEIGHT_LEVELS,
        QuantisedRange.from_values(projection(x), levels=OUTPUT_LEVELS).step
        if stores_output
        else 0.0,
    )


def support_status(use: Callable[[], object]) -> str:
    """Return ``works``, ``works, deprecated`` if torch warns of removal, or ``gone``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            use()
        except (AttributeError, ImportError, NotImplementedError, RuntimeError):
            return "gone"
    is_deprecated = any("deprecated" in str(warning.message) for warning in caught)
    return "works, deprecated" if is_deprecated else "works"


def support_status_always_warning(use: Callable[[], object]) -> str:
    """Return the status of a feature whose warning torch shows only once in a process."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        return support_status(use)
    finally:
        torch.set_warn_always(before)
