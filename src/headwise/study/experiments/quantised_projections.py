"""Projections with eight-bit integers in place of floats, and how far they may be off.

A number is stored as the nearest of a row of evenly spaced ones, ``step`` apart, so it moves by
at most half a step. With steps s_x, s_w and s_y for inputs, weights and outputs,

    |error of output o| <= s_x / 2 * sum |w_oi| + s_w / 2 * sum |x_i| + n * s_x * s_w / 4 + s_y / 2

where both sums run over the n inputs i: each product is off by at most
|x| * s_w / 2 + |w| * s_x / 2 + s_x * s_w / 4, the sum of integers is exact, and the output is
stored once more. Integers may also store the bias, in steps of s_x * s_w. A range that ends
between two steps loses no more than half a step at its end.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

# Of the 256 values of quint8 the inputs use half, as torch's own defaults do on x86: with all of
# them the sum of two products overflows sixteen bits, which older processors keep it in.
INPUT_LEVELS, OUTPUT_LEVELS, WEIGHT_LEVELS = 127, 255, 254


@dataclass(frozen=True)
class QuantisedRange:
    """Evenly spaced numbers: ``step`` apart, with ``zero`` of them below 0."""

    step: float
    zero: int

    @classmethod
    def over(cls, x: Tensor, *, levels: int) -> QuantisedRange:
        """So many steps from the least to the largest number of ``x``, 0 among them."""
        low, high = (float(end) for end in x.detach().aminmax())
        low, high = min(low, 0.0), max(high, 0.0)
        step = (high - low) / levels
        return cls(step, round(-low / step))


def quantised_weight(weight: Float[Tensor, "out_features in_features"]) -> Tensor:
    """As qint8: as many steps below 0 as above."""
    step = 2 * float(weight.detach().abs().max()) / WEIGHT_LEVELS
    return torch.quantize_per_tensor(weight.detach(), step, 0, torch.qint8)


class StaticQuantised(nn.Module):
    """quint8 times qint8 with steps that are fixed before; floats go in and come out.

    Args:
        projection: the projection of floats.
        x: inputs like those to come, which the steps are chosen for.
        packs_every_call: whether the weights are brought into the kernel's order on every call, as
            by ``torch.ao.nn.quantized.functional.linear``, or once.
    """

    def __init__(self, projection: nn.Linear, x: Tensor, *, packs_every_call: bool) -> None:
        super().__init__()
        self.given = QuantisedRange.over(x, levels=INPUT_LEVELS)
        self.told = QuantisedRange.over(projection(x), levels=OUTPUT_LEVELS)
        self.weight, self.bias = quantised_weight(projection.weight), projection.bias.detach()
        self.packed = None if packs_every_call else self._packed(projection)

    def forward(self, x: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch out"]:
        """(..., in_features) to (..., out_features)."""
        stored = torch.quantize_per_tensor(x, self.given.step, self.given.zero, torch.quint8)
        if self.packed is None:
            told = torch.ao.nn.quantized.functional.linear(
                stored, self.weight, self.bias, self.told.step, self.told.zero
            )
        else:
            told = self.packed(stored)
        return told.dequantize()

    def _packed(self, projection: nn.Linear) -> nn.Module:
        packed = torch.ao.nn.quantized.Linear(projection.in_features, projection.out_features)
        packed.set_weight_bias(self.weight, self.bias)
        packed.scale, packed.zero_point = self.told.step, self.told.zero
        return packed


def dynamically(projection: nn.Linear) -> nn.Module:
    """int8 weights, packed once; steps for the inputs are chosen at every call, by torch."""
    found = torch.ao.nn.quantized.dynamic.Linear(projection.in_features, projection.out_features)
    found.set_weight_bias(quantised_weight(projection.weight), projection.bias.detach())
    return found


class BFloat16Projection(nn.Module):
    """A projection in bfloat16; float32 goes in and comes out."""

    def __init__(self, projection: nn.Linear) -> None:
        super().__init__()
        self.weight = projection.weight.detach().bfloat16()
        self.bias = projection.bias.detach().bfloat16()

    def forward(self, x: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch out"]:
        """(..., in_features) to (..., out_features)."""
        return nn.functional.linear(x.bfloat16(), self.weight, self.bias).float()


@torch.no_grad()
def bound(
    projection: nn.Linear, x: Float[Tensor, "*batch in_features"], *, stores_output: bool
) -> Float[Tensor, "*batch out"]:
    """How far each output may be off, in float64; the formula stands at the top of this file."""
    weight, wide = projection.weight.detach().double(), x.double()
    of_x, of_weight, of_output = _steps(projection, x, stores_output)
    ones = torch.ones_like
    by_inputs = of_x / 2 * nn.functional.linear(ones(wide), weight.abs())
    by_weights = of_weight / 2 * nn.functional.linear(wide.abs(), ones(weight))
    both = (projection.in_features / 4 + 1 / 2) * of_x * of_weight
    return by_inputs + by_weights + both + of_output / 2


@torch.no_grad()
def expected(
    projection: nn.Linear, x: Float[Tensor, "*batch in_features"], *, stores_output: bool
) -> float:
    """The root mean square of the error, if no two roundings have to do with each other.

    What is rounded to steps is off by step / sqrt(12) in the root mean square.
    """
    weight, wide = projection.weight.detach().double(), x.double()
    of_x, of_weight, of_output = _steps(projection, x, stores_output)
    by_inputs = of_x**2 * float((weight**2).sum(1).mean())
    by_weights = of_weight**2 * float((wide**2).sum(-1).mean())
    return float(((by_inputs + by_weights + of_output**2) / 12) ** 0.5)


def _steps(projection: nn.Linear, x: Tensor, stores_output: bool) -> tuple[float, float, float]:
    """Those of inputs, weights and outputs."""
    return (
        QuantisedRange.over(x, levels=INPUT_LEVELS).step,
        2 * float(projection.weight.detach().abs().max()) / WEIGHT_LEVELS,
        QuantisedRange.over(projection(x), levels=OUTPUT_LEVELS).step if stores_output else 0.0,
    )


def status_of(use: Callable[[], object]) -> str:
    """``works``, ``works, deprecated`` where torch warns that it is about to go, or ``gone``."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            use()
        except (AttributeError, ImportError, NotImplementedError, RuntimeError):
            return "gone"
    about_to_go = any("deprecated" in str(warning.message) for warning in heard)
    return "works, deprecated" if about_to_go else "works"


def status_of_once(use: Callable[[], object]) -> str:
    """The same of something that torch warns of only once in a process."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        return status_of(use)
    finally:
        torch.set_warn_always(before)
