"""Casts of biases to the dtype of the scores; finite numbers stay finite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def cast_bias(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bias in ``dtype``; a number stays finite, and keeps its sign.

    Rounding alone would make -inf, which hides a key, of float32's ``finfo.min`` in bfloat16, and
    +inf, which makes NaN, of 7e4 in float16. Such numbers become the lowest or the largest one.
    """
    cast = bias.to(dtype)
    limits = torch.finfo(dtype)
    if torch.finfo(bias.dtype).max <= limits.max:
        return cast
    return torch.where(bias.isinf(), cast, bias.clamp(limits.min, limits.max).to(dtype))


def cast_biases_for_sum(parts: Sequence[Tensor], dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield biases in ``dtype``, to be added up: of finite numbers, the sum is finite too."""
    if len(parts) < 2:
        yield from (cast_bias(part, dtype) for part in parts)
        return
    limit = torch.finfo(dtype).max / len(parts)
    for part in parts:
        if torch.finfo(part.dtype).max <= limit:
            yield part.to(dtype)
        else:
            yield torch.where(part.isinf(), part, part.clamp(-limit, limit)).to(dtype)
