"""Weights that are no plain tensors: quantised ones, and those that are spread over devices."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from headwise.support.private_torch import is_wrapper


def plain_parts(weight: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that a weight is made of: itself, or its integers and its scales."""
    if not is_wrapper(weight):
        yield weight
        return
    for name in weight.__tensor_flatten__()[0]:
        yield from plain_parts(getattr(weight, name))


def as_floats(weight: Tensor) -> Tensor | None:
    """Return a weight as a plain tensor of floating-point numbers; None where it has no such form.

    A quantised weight is dequantised: these are the numbers that its products are made with.
    """
    if is_wrapper(weight):
        if type(weight).dequantize is Tensor.dequantize:  # spread over devices
            return None
        weight = weight.dequantize()
    return weight if weight.is_floating_point() else None
