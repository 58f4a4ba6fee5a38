"""Rotary position embedding (RoPE): queries and keys rotated by angles that grow with position.

The score of a query and a key then depends on their positions by distance alone (Su et al. 2021,
arXiv:2104.09864). Channels are rotated in pairs; there are two conventions for the pairs:

    half-split    i and i + width / 2    GPT-NeoX, Hugging Face's Llama and most others
    interleaved   2i and 2i + 1          the paper, Meta's Llama, GPT-J, Cohere
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from headwise.errors import DeviceError, DTypeError, OptionError, ShapeError
from headwise.function import scaling as scalings
from headwise.function.scaling import Arithmetic, Scaling, unscaled_frequencies
from headwise.function.spec import Pairing, RotaryRule
from headwise.support.text import describe_value
from headwise.support.tracing import may_read_values


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding of queries and keys; a frozen value without tensors or parameters.

    Pair i turns by ``theta ** (-2i / width)`` radians for each token, before scaling.

    Args:
        theta: the base of the frequencies.
        width: the number of leading channels of a head that are rotated, head_dim by default. The
            remaining channels are unchanged.
        pairing: "half-split" pairs channels i and i + width / 2, "interleaved" 2i and 2i + 1.
        scaling: lowers the frequencies for longer contexts: `LinearScaling`, `NTKScaling`,
            `YarnScaling` or `Llama3Scaling`.

    Raises:
        OptionError: a value outside its range.
    """

    theta: float = 10_000.0
    width: int | None = None
    pairing: Pairing = "half-split"
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        scalings.require_positive_fields(self, "theta")
        if self.width is not None and not (
            isinstance(self.width, int) and self.width >= 2 and self.width % 2 == 0
        ):
            raise OptionError(
                saw=f"Rotary(width={describe_value(self.width)})",
                needed="an even number of channels from 2, or None for the whole head",
                do="for a share of the head, multiply: width=head_dim // 2",
            )
        if self.pairing not in ("half-split", "interleaved"):
            raise OptionError(
                saw=f"Rotary(pairing={describe_value(self.pairing)})",
                needed='"half-split" (i with i + width / 2) or "interleaved" (2i with 2i + 1)',
                do='"half-split" for most Hugging Face models, "interleaved" for GPT-J and Cohere',
            )
        if self.scaling is not None and not isinstance(self.scaling, Scaling):
            raise OptionError(
                saw=f"Rotary(scaling={describe_value(self.scaling)})",
                needed="LinearScaling, NTKScaling, YarnScaling, Llama3Scaling or None",
                do="e.g. LinearScaling(4.0)",
            )

    def rotated_width(self, head_dim: int) -> int:
        """Return the number of rotated channels in a head of ``head_dim``.

        Raises:
            OptionError: a width above head_dim, or an odd one.
        """
        width = head_dim if self.width is None else self.width
        if width > head_dim or width % 2 or width < 2:
            most = head_dim - head_dim % 2
            raise OptionError(
                saw=f"a rotary width of {width} in a head_dim of {head_dim}",
                needed=f"an even number of channels from 2 to {head_dim}",
                do=f"Rotary(width={most})" if most else "make the heads wider",
            )
        return width

    def frequencies(
        self, head_dim: int, *, device: torch.device | str = "cpu"
    ) -> Float[Tensor, " pairs"]:
        """Return the angle of each pair for one token, in radians, (pairs,), float32.

        Raises:
            OptionError: as `rotated_width` and the scaling.
        """
        width = self.rotated_width(head_dim)
        if self.scaling is None:
            return unscaled_frequencies(self.theta, width, device=device)
        return self.scaling.scaled_frequencies(self.theta, width, device=device)

    @property
    def attention_factor(self) -> float:
        """Factor of rotated queries and keys: 1 except for YaRN."""
        return 1.0 if self.scaling is None else self.scaling.amplitude

    def rotate(
        self,
        x: Float[Tensor, "batch heads length head_dim"],
        positions: Integer[Tensor, " length"] | Integer[Tensor, "#batch length"],
    ) -> Float[Tensor, "batch heads length head_dim"]:
        """Rotate queries or keys by their positions.

        Angles are float32, or float64 for float64. Half types are rotated in float32 and rounded
        once.

        Args:
            x: (batch, heads, length, head_dim).
            positions: the position of each token, (length,) for all sequences or (batch, length).

        Raises:
            OptionError: a rotary width above head_dim, or an odd one.
            ShapeError: ``x`` is not 4-D, or there is not one position for each token.
            DTypeError: ``x`` is no float, or positions are no integers.
            DeviceError: positions on another device than ``x``.
        """
        return _apply_rotation(x, *self._cos_and_sin(x, positions), self.pairing)

    def rotate_both(
        self,
        q: Float[Tensor, "batch heads length head_dim"],
        k: Float[Tensor, "batch kv_heads length head_dim"],
        positions: Integer[Tensor, " length"] | Integer[Tensor, "#batch length"],
    ) -> tuple[
        Float[Tensor, "batch heads length head_dim"],
        Float[Tensor, "batch kv_heads length head_dim"],
    ]:
        """Rotate queries and keys of the same tokens, with one computation of the angles.

        Raises:
            ShapeError: ``q`` and ``k`` differ in length or head_dim; and the errors of ``rotate``.
        """
        if q.shape[2:] != k.shape[2:]:
            raise ShapeError(
                saw=f"q of shape {tuple(q.shape)} and k of shape {tuple(k.shape)}",
                needed="the same length and head_dim",
                do="rotate(q, ...) and rotate(k, ...), each with its own positions",
            )
        cos, sin = self._cos_and_sin(q, positions)
        rotated = _apply_rotation(q, cos, sin, self.pairing)
        return rotated, _apply_rotation(k, cos, sin, self.pairing)

    def _cos_and_sin(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors of each channel and of its partner, (length, width).

        For positions of (batch, length) the factors are (batch, 1, length, width).
        """
        _check_rotate_arguments(x, positions)
        exact = torch.promote_types(x.dtype, torch.float32)
        angles = positions[..., None].to(exact) * _frequencies_on_device(self, x).to(exact)
        if positions.dim() == 2:
            angles = angles[:, None]
        return _rotation_factors(angles, self.attention_factor, self.pairing)


def _rotation_factors(angles: Tensor, amplitude: float, pairing: Pairing) -> tuple[Tensor, Tensor]:
    """Return the factors of each channel and of its partner, from the angles of the pairs."""
    cos, sin = angles.cos(), angles.sin()
    if amplitude != 1.0:
        cos, sin = cos * amplitude, sin * amplitude
    if pairing == "half-split":
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return torch.stack((cos, cos), -1).flatten(-2), torch.stack((-sin, sin), -1).flatten(-2)


def _apply_rotation(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing) -> Tensor:
    width = cos.shape[-1]
    # Cast before the two uses: the gradient is then summed in cos.dtype and rounded once.
    leading = x[..., :width].to(cos.dtype)
    rotated = leading * cos
    rotated += _swap_pairs(leading, pairing) * sin
    rotated = rotated.to(x.dtype)
    return rotated if width == x.shape[-1] else torch.cat((rotated, x[..., width:]), -1)


def _swap_pairs(x: Tensor, pairing: Pairing) -> Tensor:
    """Swap the two channels of each pair."""
    if pairing == "half-split":
        return x.roll(x.shape[-1] // 2, -1)
    return x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).flip(-1).flatten(-2)


# ---- the rotation of a description, which may be a wrong one -------------------------------------


def frequencies_of_rule(rule: RotaryRule) -> Tensor:
    """Return the angle of each pair for one token, in radians, (pairs,), float64."""
    exact = _exact_frequencies(rule.theta, rule.width, rule.exponent_width, rule.scaling)
    return exact if rule.dtype is None else exact.to(rule.dtype).double()


def count_channels(rule: RotaryRule) -> int:
    """Return the number of channels of a head up to the last one that turns."""
    return max(rule.width, (rule.span or 0) + rule.width // 2)


def has_frequencies(rule: RotaryRule) -> bool:
    """True if a rule has frequencies: a YaRN without a pair on its ramp has none."""
    try:
        frequencies_of_rule(rule)
    except OptionError:
        return False
    return True


@lru_cache(maxsize=64)  # a search rotates by the same frequencies thousands of times
def _exact_frequencies(
    theta: float, width: int, exponent_width: int | None, scaling: Scaling | None
) -> Tensor:
    width -= width % 2
    arithmetic: Arithmetic = {"dtype": torch.float64, "exponent_width": exponent_width}
    # One pair turns by 1 for each theta, and a YaRN of no pairs has no ramp.
    is_single = isinstance(scaling, scalings.NTKScaling) and (exponent_width or width) == 2
    if scaling is None or not width or is_single:
        return unscaled_frequencies(theta, width, **arithmetic)
    return scaling.scaled_frequencies(theta, width, **arithmetic)


def rotate_by_rule(rule: RotaryRule, x: Tensor, positions: Tensor) -> Tensor:
    """Return (batch, heads, length, head_dim) rotated by positions, (batch, length)."""
    angles = positions[:, None, :, None].double() * frequencies_of_rule(rule)
    return rotate_by_angles(rule, x, angles)


def rotate_by_angles(rule: RotaryRule, x: Tensor, angles: Tensor) -> Tensor:
    """Return ``x`` with the channels of each pair turned by ``angles`` (..., pairs)."""
    count = angles.shape[-1]
    factors = _rotation_factors(angles, rule.amplitude, rule.pairing)
    if rule.span is None or rule.pairing == "interleaved":
        return _apply_rotation(x, *factors, rule.pairing)
    first, second = slice(0, count), slice(rule.span, rule.span + count)
    pairs = torch.cat((x[..., first], x[..., second]), -1)
    turned = x.clone()
    halves = _apply_rotation(pairs, *factors, rule.pairing).chunk(2, -1)
    turned[..., first], turned[..., second] = halves
    return turned


# ---- checks and caches --------------------------------------------------------------------------


def _frequencies_on_device(rotary: Rotary, x: Tensor) -> Tensor:
    """Return the frequencies on the device of ``x``, cached in eager mode and CUDA graphs."""
    if may_read_values(x) or _is_in_cuda_graph(x):
        return _cached_frequencies(rotary, x.shape[-1], x.device)
    return rotary.frequencies(x.shape[-1], device=x.device)


@lru_cache(maxsize=256)
def _cached_frequencies(rotary: Rotary, head_dim: int, device: torch.device) -> Tensor:
    # Computed on the CPU: powers on other devices differ in the last bit.
    return rotary.frequencies(head_dim).to(device)


def _is_in_cuda_graph(x: Tensor) -> bool:
    """True during the capture of a CUDA graph, which may read a cached tensor but make none."""
    if torch.compiler.is_compiling() or not x.is_cuda:
        return False
    return bool(torch.cuda.is_current_stream_capturing())


def _check_rotate_arguments(x: Tensor, positions: Tensor) -> None:
    if x.dim() != 4:
        raise ShapeError(
            saw=f"x of shape {tuple(x.shape)}",
            needed="(batch, heads, length, head_dim)",
            do="split the heads first, e.g. x.unflatten(-1, (heads, head_dim)).transpose(1, 2)",
        )
    if not x.is_floating_point():
        raise DTypeError(saw=f"x of dtype {x.dtype}", needed="a float", do="e.g. x.float()")
    batch, length = x.shape[0], x.shape[2]
    if positions.is_floating_point() or positions.dtype == torch.bool:
        raise DTypeError(
            saw=f"positions of dtype {positions.dtype}",
            needed="whole numbers of tokens",
            do="e.g. torch.arange(length); to stretch positions, Rotary(scaling=...)",
        )
    shape = tuple(positions.shape)
    if shape != (length,) and shape != (batch, length) and shape != (1, length):
        raise ShapeError(
            saw=f"positions of shape {shape} for x of shape {tuple(x.shape)}",
            needed=f"(length {length},) or (batch {batch}, length {length})",
            do="pass one position for each token, e.g. torch.arange(length)",
        )
    if positions.device != x.device:
        raise DeviceError(
            saw=f"positions on {positions.device} for x on {x.device}",
            needed="one device",
            do=f'positions.to("{x.device}")',
        )
