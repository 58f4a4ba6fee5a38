"""Rotary angles and rotations, from the published formulas."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from benchmarks.faults.geometry import RotarySettings


def frequencies(rotary: RotarySettings) -> Tensor:
    """Return the angle per position of each plane, in float64."""
    base = rotary.exponent_width or rotary.width
    planes = torch.arange(rotary.width // 2, dtype=torch.float64)
    theta = rotary.theta
    if rotary.scaling == "ntk":
        theta *= rotary.factor ** (base / (base - 2))
    plain = theta ** (-2 * planes / base)
    if rotary.scaling == "linear":
        return plain / rotary.factor
    if rotary.scaling == "llama3":
        return _llama3(plain, rotary)
    if rotary.scaling == "yarn":
        return _yarn(plain, rotary)
    return plain


def _llama3(plain: Tensor, rotary: RotarySettings) -> Tensor:
    """Slow planes are divided by the factor, fast ones kept, with a ramp from 1 to 4 turns."""
    turns = rotary.original_length * plain / (2 * math.pi)
    kept = ((turns - 1) / 3).clamp(0, 1)
    return kept * plain + (1 - kept) * plain / rotary.factor


def _yarn(plain: Tensor, rotary: RotarySettings) -> Tensor:
    """As `_llama3`, with a ramp over the planes that turn between 1 and 32 times."""

    def plane(turns: float) -> float:
        span = rotary.width * math.log(rotary.original_length / (turns * 2 * math.pi))
        return span / (2 * math.log(rotary.theta))

    low = max(math.floor(plane(32.0)), 0)
    high = min(math.ceil(plane(1.0)), rotary.width - 1)
    ramp = (torch.arange(len(plain), dtype=torch.float64) - low) / max(high - low, 1e-3)
    divided = ramp.clamp(0, 1)
    return (1 - divided) * plain + divided * plain / rotary.factor


def pairs(rotary: RotarySettings, span: int | None = None) -> Tensor:
    """Return the two channels of each plane, (2, planes).

    ``span`` is the distance of the two channels of half-split pairs; half the width if None.
    """
    planes = torch.arange(rotary.width // 2)
    if rotary.pairing == "interleaved":
        return torch.stack([2 * planes, 2 * planes + 1])
    return torch.stack([planes, planes + (span or rotary.width // 2)])


def turn(x: Tensor, angles: Tensor, planes: Tensor, factor: float = 1.0) -> Tensor:
    """Rotate the planes of x, (..., channels), by ``angles``, which broadcast to (..., planes)."""
    first, second = x[..., planes[0]], x[..., planes[1]]
    cos, sin = (angles.cos() * factor).to(x.dtype), (angles.sin() * factor).to(x.dtype)
    result = x.clone()
    result[..., planes[0]] = first * cos - second * sin
    result[..., planes[1]] = second * cos + first * sin
    return result
