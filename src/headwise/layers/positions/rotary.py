"""Rotary position embedding: queries and keys turn by angles that grow with their position.

The score of a query and a key then depends on their distance alone (Su et al. 2021,
arXiv:2104.09864). Channels turn in pairs, and there are two conventions for which two make a pair:

    half-split    i and i + width / 2    GPT-NeoX, Hugging Face's Llama and most others
    interleaved   2i and 2i + 1          the paper, Meta's Llama, GPT-J, Cohere
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from headwise.errors import DeviceError, DTypeError, OptionError, ShapeError
from headwise.layers.positions.rotary_scaling import Scaling, frequencies_of, require_positive
from headwise.support.axes import describe_value
from headwise.support.tracing import may_read_values

Pairing = Literal["half-split", "interleaved"]


@dataclass(frozen=True)
class Rotary:
    """How queries and keys are rotated. A value: it holds no tensor and no parameter.

    Args:
        theta: the base of the frequencies.
        width: how many leading channels of a head are rotated, all of them by default. The
            frequencies are those of this width; the channels behind it pass through.
        pairing: which two channels make a pair.
        scaling: stretches the frequencies for longer texts.

    Raises:
        OptionError: a value outside its range.
    """

    theta: float = 10_000.0
    width: int | None = None
    pairing: Pairing = "half-split"
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        require_positive(self, "theta")
        if self.width is not None and not _is_width(self.width):
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

    def width_in(self, head_dim: int) -> int:
        """How many channels of a head are rotated.

        Raises:
            OptionError: more than the head has, or an odd number.
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
        """Radians for each token of each pair, float32."""
        width = self.width_in(head_dim)
        if self.scaling is None:
            return frequencies_of(self.theta, width, device=device)
        return self.scaling.scale(self.theta, width, device=device)

    @property
    def attention_factor(self) -> float:
        """What rotated vectors are multiplied by; 1 but for YaRN."""
        return 1.0 if self.scaling is None else self.scaling.amplitude

    def rotate(
        self,
        x: Float[Tensor, "batch heads length head_dim"],
        positions: Integer[Tensor, " length"] | Integer[Tensor, "#batch length"],
    ) -> Float[Tensor, "batch heads length head_dim"]:
        """Queries or keys, each rotated to its position.

        Angles are float32, float64 for float64; the half types are rotated in float32 and rounded
        once.

        Args:
            x: the vectors.
            positions: of each token, for all sequences or for each.

        Raises:
            OptionError: ``head_dim`` does not hold the rotary width.
            ShapeError: ``x`` is not 4-D, or there is not one position for each token.
            DTypeError, DeviceError: positions that are no integers, or on another device.
        """
        return self._turned(x, *self._waves(x, positions))

    def rotate_both(
        self,
        q: Float[Tensor, "batch heads length head_dim"],
        k: Float[Tensor, "batch kv_heads length head_dim"],
        positions: Integer[Tensor, " length"] | Integer[Tensor, "#batch length"],
    ) -> tuple[
        Float[Tensor, "batch heads length head_dim"],
        Float[Tensor, "batch kv_heads length head_dim"],
    ]:
        """Queries and keys of the same tokens: ``rotate`` of both, at the cost of one cosine.

        Raises:
            ShapeError: ``q`` and ``k`` differ in length or head_dim, or as for ``rotate``.
        """
        if q.shape[2:] != k.shape[2:]:
            raise ShapeError(
                saw=f"q of shape {tuple(q.shape)} and k of shape {tuple(k.shape)}",
                needed="the same length and head_dim",
                do="rotate(q, ...) and rotate(k, ...), each with its own positions",
            )
        waves = self._waves(q, positions)
        return self._turned(q, *waves), self._turned(k, *waves)

    # ---- within -----------------------------------------------------------------------------

    def _waves(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What a vector and its partner are multiplied by, (batch or none, 1, length, width)."""
        _check(x, positions)
        exact = torch.promote_types(x.dtype, torch.float32)
        angles = positions[..., None].to(exact) * _frequencies(self, x).to(exact)
        if positions.dim() == 2:
            angles = angles[:, None]
        cos, sin = angles.cos(), angles.sin()
        if (factor := self.attention_factor) != 1.0:
            cos, sin = cos * factor, sin * factor
        if self.pairing == "half-split":
            return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return torch.stack((cos, cos), -1).flatten(-2), torch.stack((-sin, sin), -1).flatten(-2)

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        width = cos.shape[-1]
        # Widened before it is used twice: the gradient too is summed wide, and rounded once.
        leading = x[..., :width].to(cos.dtype)
        turned = leading * cos
        turned += self._partner(leading) * sin
        turned = turned.to(x.dtype)
        return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), -1)

    def _partner(self, x: Tensor) -> Tensor:
        """Each channel replaced by the other one of its pair."""
        if self.pairing == "half-split":
            return x.roll(x.shape[-1] // 2, -1)
        return x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).flip(-1).flatten(-2)


def _is_width(width: object) -> bool:
    return isinstance(width, int) and width >= 2 and width % 2 == 0


def _frequencies(rotary: Rotary, x: Tensor) -> Tensor:
    """On the device of ``x``. In eager mode they are computed once."""
    if may_read_values(x) or _is_captured(x):
        return _kept_frequencies(rotary, x.shape[-1], x.device)
    return rotary.frequencies(x.shape[-1], device=x.device)


@lru_cache(maxsize=256)
def _kept_frequencies(rotary: Rotary, head_dim: int, device: torch.device) -> Tensor:
    # On the CPU first: other devices take powers with another last bit.
    return rotary.frequencies(head_dim).to(device)


def _is_captured(x: Tensor) -> bool:
    """A CUDA graph may read what was kept before, and make nothing."""
    if torch.compiler.is_compiling() or not x.is_cuda:
        return False
    return bool(torch.cuda.is_current_stream_capturing())


def _check(x: Tensor, positions: Tensor) -> None:
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
            do="give one position for each token",
        )
    if positions.device != x.device:
        raise DeviceError(
            saw=f"positions on {positions.device} for x on {x.device}",
            needed="one device",
            do=f'positions.to("{x.device}")',
        )
