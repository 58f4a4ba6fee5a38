"""Rotary position embedding (RoPE): queries and keys rotated by angles that grow with position.

The score of a query and a key then depends on their positions by distance alone (Su et al. 2021,
arXiv:2104.09864). Channels are rotated in pairs; there are two conventions for the pairs:

    half-split    i and i + width / 2    GPT-NeoX, Hugging Face's Llama and most others
    interleaved   2i and 2i + 1          the paper, Meta's Llama, GPT-J, Cohere
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Literal, Unpack, get_args

import torch
from jaxtyping import Float, Integer, Shaped
from torch import Tensor

from headwise.errors import DeviceError, DTypeError, OptionError, ShapeError
from headwise.function import scaling as scalings
from headwise.function.scaling import Arithmetic, Scaling, unscaled_frequencies
from headwise.function.spec import Pairing, RotaryRule
from headwise.support.text import describe_value
from headwise.support.tracing import may_read_values


@dataclass(frozen=True, repr=False)
class Rotary(RotaryRule):
    """Rotary embedding of queries and keys; a frozen value without tensors or parameters.

    Pair i turns by ``theta ** (-2i / width)`` radians for each token, before scaling.

    Args:
        theta: the base of the frequencies.
        width: the number of leading channels of a head that are rotated, head_dim by default. The
            remaining channels are unchanged.
        pairing: "half-split" pairs channels i and i + width / 2, "interleaved" 2i and 2i + 1.
        scaling: lowers the frequencies for longer contexts: `LinearScaling`, `NTKScaling`,
            `YarnScaling`, `Llama3Scaling`, `LongScaling` or `DynamicScaling`; or
            `ProportionalScaling`, by which only the first pairs turn.
        exponent_width: pair i turns by ``theta ** (-2i / exponent_width)``; width by default.
        span: the distance of the two channels of a half-split pair; width / 2 by default.
        attention_factor: the factor of rotated queries and keys; that of the scaling by default.
        axes: for each pair the axis of the positions by which it turns, such as time, row and
            column of a token; `axes_of_sections` makes them. A call then takes positions of
            (axes, batch, length); tokens without positions have one number in all axes.
        backwards: True if pairs turn by minus the angle.
        numbers: for each pair the i of its frequency, where they do not count from 0 to the last.
        parts: equal parts of the width, each of which has its half-split pairs for itself.
        q_offset: added to the positions of queries.
        k_offset: added to the positions of keys.
        dtype: to which the frequencies are rounded, as in code that keeps them in a half type.

    Raises:
        OptionError: a value outside its range.
    """

    theta: float = 10_000.0
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        optional = ("exponent_width", "span", "attention_factor")
        given = (name for name in optional if getattr(self, name) is not None)
        scalings.require_positive_fields(self, "theta", *given)
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
            kinds = ", ".join(kind.__name__ for kind in get_args(Scaling))
            raise OptionError(
                saw=f"Rotary(scaling={describe_value(self.scaling)})",
                needed=f"{kinds} or None",
                do="e.g. LinearScaling(4.0)",
            )
        axes = self.axes
        if axes is not None and not (
            isinstance(axes, tuple) and axes and all(isinstance(n, int) and n >= 0 for n in axes)
        ):
            raise OptionError(
                saw=f"Rotary(axes={describe_value(axes)})",
                needed="a tuple with the number of the axis of each pair, from 0",
                do="e.g. axes=axes_of_sections((16, 24, 24)), of headwise.function",
            )

    @classmethod
    def of_plane(cls, theta: float, head_dim: int, *, order: PlaneOrder = "halves") -> Rotary:
        """Return a rotation by row and column, as in vision towers.

            halves       HHHHWWWWHHHHWWWW, both by theta ** (-4i / head_dim); Qwen-VL, DINOv3
            alternating  the same channels; rows take even frequencies, columns odd ones; Pixtral
            parts        HHHHHHHHWWWWWWWW, with the frequencies of "halves"; Gemma 4

        A call takes positions of (2, batch, length): rows, then columns. DINOv3 takes 2 pi times
        the centre of a patch, from -1 to 1, and 0 for tokens that do not turn.

        Raises:
            OptionError: another order, or a head_dim that is no multiple of 4.
        """
        if order not in get_args(PlaneOrder) or head_dim % 4:
            raise OptionError(
                saw=f"Rotary.of_plane(head_dim={head_dim}, order={describe_value(order)})",
                needed=f"a multiple of 4, and one of {', '.join(map(repr, get_args(PlaneOrder)))}",
                do='e.g. Rotary.of_plane(100.0, 64, order="halves"), as in DINOv3',
            )
        quarter = head_dim // 4
        even = tuple(range(0, 2 * quarter, 2))
        odd = tuple(i + 1 for i in even)
        return cls(
            theta,
            head_dim,
            axes=(0,) * quarter + (1,) * quarter,
            numbers=(*even, *(odd if order == "alternating" else even)),
            parts=2 if order == "parts" else 1,
        )

    @classmethod
    def of(cls, rule: RotaryRule) -> Rotary:
        """Return the options of a rotation that a description states."""
        return cls(**{name: getattr(rule, name) for name in _FIELDS})

    @property
    def rule(self) -> RotaryRule:
        """The rotation, as `AttentionSpec` has it."""
        return RotaryRule(**{name: getattr(self, name) for name in _FIELDS})

    @property
    def axis_count(self) -> int:
        """The number of axes of positions, 1 where each token has one."""
        return 1 if self.axes is None else 1 + max(self.axes)

    @property
    def depends_on_length(self) -> bool:
        """True if the frequencies change with the number of tokens of a sequence."""
        return self.scaling is not None and self.scaling.depends_on_length

    def rotated_width(self, head_dim: int) -> int:
        """Return the number of rotated channels in a head of ``head_dim``.

        Raises:
            OptionError: a width above head_dim, or an odd one; axes of another number of pairs.
        """
        width = head_dim if self.width is None else self.width
        if width > head_dim or width % 2 or width < 2:
            most = head_dim - head_dim % 2
            raise OptionError(
                saw=f"a rotary width of {width} in a head_dim of {head_dim}",
                needed=f"an even number of channels from 2 to {head_dim}",
                do=f"Rotary(width={most})" if most else "make the heads wider",
            )
        if self.axes is not None and len(self.axes) != width // 2:
            counts = ", ".join(str(self.axes.count(axis)) for axis in range(self.axis_count))
            raise OptionError(
                saw=f"axes for {len(self.axes)} pairs, in sections of {counts}, and a rotary width "
                f"of {width}",
                needed=f"an axis for each of {width // 2} pairs",
                do="pass sections that add up to half of the rotated channels",
            )
        numbers = self.numbers
        is_fit = numbers is None or (len(numbers) == width // 2 > max(numbers))
        if not is_fit or width % (2 * self.parts) or (self.parts > 1 and self.span):
            raise OptionError(
                saw=f"numbers={numbers} and parts={self.parts} in a rotary width of {width}",
                needed=f"a number from 0 to {width // 2 - 1} for each of {width // 2} pairs, and "
                "parts that divide the pairs",
                do="Rotary.of_plane(theta, head_dim) makes them",
            )
        return width

    def frequencies(
        self, head_dim: int, *, device: torch.device | str = "cpu", length: Tensor | None = None
    ) -> Float[Tensor, "*batch pairs"]:
        """Return the angle of each pair for one token, in radians, (pairs,), float32.

        ``length`` is the number of tokens of a sequence, for a scaling by it; the frequencies have
        its shape before the pairs then. Without it they are those of a short sequence.

        Raises:
            OptionError: as `rotated_width` and the scaling.
        """
        return self._frequencies(head_dim, device=device, length=length, dtype=torch.float32)

    def _frequencies(self, head_dim: int, **arithmetic: Unpack[Arithmetic]) -> Tensor:
        width, dtype = self.rotated_width(head_dim), arithmetic["dtype"]
        arithmetic["exponent_width"] = self.exponent_width
        if self.scaling is None:
            frequencies = unscaled_frequencies(self.theta, width, **arithmetic)
        else:
            frequencies = self.scaling.scaled_frequencies(self.theta, width, **arithmetic)
        frequencies = frequencies if self.dtype is None else frequencies.to(self.dtype).to(dtype)
        return frequencies if self.numbers is None else frequencies[..., list(self.numbers)]

    def rotate(
        self,
        x: Float[Tensor, "batch heads length head_dim"],
        positions: Shaped[Tensor, "*axes length"],
        *,
        length: Integer[Tensor, "*#batch"] | None = None,
        offset: float = 0.0,
    ) -> Float[Tensor, "batch heads length head_dim"]:
        """Rotate queries or keys by their positions.

        Angles are float32, or float64 for float64. Half types are rotated in float32 and rounded
        once.

        Args:
            x: (batch, heads, length, head_dim).
            positions: the position of each token, (length,) for all sequences or (batch, length);
                with ``axes`` also (axes, batch, length), where they may be floats.
            length: the number of tokens of each token's sequence, which broadcasts to the
                positions, for a scaling by it.
            offset: added to the positions.

        Raises:
            OptionError: a rotary width above head_dim, or an odd one.
            ShapeError: ``x`` is not 4-D, or there is not one position for each token.
            DTypeError: ``x`` is no float, or positions are no integers.
            DeviceError: positions on another device than ``x``.
        """
        return self._turn(x, self._cos_and_sin(x, positions, length, offset))

    def rotate_both(
        self,
        q: Float[Tensor, "batch heads length head_dim"],
        k: Float[Tensor, "batch kv_heads length head_dim"],
        positions: Shaped[Tensor, "*axes length"],
        *,
        length: Integer[Tensor, "*#batch"] | None = None,
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
        factors = self._cos_and_sin(q, positions, length, self.q_offset)
        rotated = self._turn(q, factors)
        if self.k_offset != self.q_offset:
            factors = self._cos_and_sin(k, positions, length, self.k_offset)
        return rotated, self._turn(k, factors)

    def _cos_and_sin(
        self, x: Tensor, positions: Tensor, length: Tensor | None, offset: float
    ) -> tuple[Tensor, Tensor]:
        """Return the factors of each channel and of its partner, (length, width).

        For positions of (batch, length) the factors are (batch, 1, length, width).
        """
        _check_rotate_arguments(x, positions, self.axis_count)
        exact = torch.promote_types(x.dtype, torch.float32)
        length = length if self.depends_on_length else None
        frequencies = _frequencies_on_device(self, x, length).to(exact)
        angles = (_places_of_pairs(self, positions).to(exact) + offset) * frequencies
        angles = -angles if self.backwards else angles
        if angles.dim() == 3:
            angles = angles[:, None]
        return _rotation_factors(angles, self.amplitude, self.pairing, self.parts)

    def _turn(self, x: Tensor, factors: tuple[Tensor, Tensor]) -> Tensor:
        return _apply_rotation(x, *factors, self.pairing, self.span, self.parts)

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        shown = (
            f"{name}={value!r}"
            for place, (name, value) in enumerate(values.items())
            if place < len(_SHOWN) or value != getattr(type(self), name)
        )
        return f"Rotary({', '.join(shown)})"


_FIELDS = tuple(field.name for field in fields(RotaryRule))
_SHOWN = _FIELDS[:4]  # in every repr
Order = Literal["blocks", "in turn", "rows first"]
PlaneOrder = Literal["halves", "alternating", "parts"]


def axes_of_sections(sections: Sequence[int], *, order: Order = "blocks") -> tuple[int, ...]:
    """Return the axis of each pair of a rotation by several positions, ``mrope_section``.

        blocks       T T H H H W W W   (2, 3, 3); Qwen2-VL, GLM-4V
        in turn      T H W T H W T T   (4, 2, 2), the first axis at the end; Qwen3-VL
        rows first   H W H W H W T T   (3, 3, 2), in which time is the last section; ERNIE 4.5 VL

    Args:
        sections: the number of pairs of each axis.
        order: which pairs these are.

    Raises:
        OptionError: another order, or sections that are no whole numbers.
    """
    if (
        order not in get_args(Order)
        or not any(sections)
        or not all(isinstance(n, int) and n >= 0 for n in sections)
    ):
        raise OptionError(
            saw=f"sections {describe_value(sections)} in the order {describe_value(order)}",
            needed=f"whole numbers, and one of {', '.join(map(repr, get_args(Order)))}",
            do='e.g. axes_of_sections((24, 20, 20), order="in turn")',
        )
    count, total = len(sections), sum(sections)
    if order == "blocks":
        return tuple(axis for axis, n in enumerate(sections) for _ in range(n))
    if order == "rows first":
        plane = total - sections[-1]
        return tuple(1 + pair % (count - 1) if pair < plane else 0 for pair in range(total))
    return tuple(
        pair % count if pair < count * sections[pair % count] else 0 for pair in range(total)
    )


def _places_of_pairs(rule: RotaryRule, positions: Tensor) -> Tensor:
    """Return the position of each token for each pair, (..., length, 1 or pairs)."""
    if positions.dim() < 3:
        return positions[..., None]
    assert rule.axes is not None
    return torch.stack([positions[axis] for axis in rule.axes], -1)


def _rotation_factors(
    angles: Tensor, amplitude: float, pairing: Pairing, parts: int = 1
) -> tuple[Tensor, Tensor]:
    """Return the factors of each channel and of its partner, from the angles of the pairs."""
    if parts > 1 and pairing == "half-split":
        every = _rotation_factors(angles.unflatten(-1, (parts, -1)), amplitude, pairing)
        return every[0].flatten(-2), every[1].flatten(-2)
    cos, sin = angles.cos(), angles.sin()
    if amplitude != 1.0:
        cos, sin = cos * amplitude, sin * amplitude
    if pairing == "half-split":
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return torch.stack((cos, cos), -1).flatten(-2), torch.stack((-sin, sin), -1).flatten(-2)


def _apply_rotation(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    pairing: Pairing,
    span: int | None = None,
    parts: int = 1,
) -> Tensor:
    width = cos.shape[-1]
    if span not in (None, width // 2) and pairing == "half-split":
        first, second = slice(0, width // 2), slice(span, span + width // 2)
        pairs = torch.cat((x[..., first], x[..., second]), -1)
        turned = x.clone()
        halves = _apply_rotation(pairs, cos, sin, pairing).chunk(2, -1)
        turned[..., first], turned[..., second] = halves
        return turned
    # Cast before the two uses: the gradient is then summed in cos.dtype and rounded once.
    leading = x[..., :width].to(cos.dtype)
    rotated = leading * cos
    rotated += _swap_pairs(leading, pairing, parts) * sin
    rotated = rotated.to(x.dtype)
    return rotated if width == x.shape[-1] else torch.cat((rotated, x[..., width:]), -1)


def _swap_pairs(x: Tensor, pairing: Pairing, parts: int = 1) -> Tensor:
    """Swap the two channels of each pair."""
    if pairing == "half-split" and parts > 1:
        return _swap_pairs(x.unflatten(-1, (parts, -1)), pairing).flatten(-2)
    if pairing == "half-split":
        return x.roll(x.shape[-1] // 2, -1)
    return x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).flip(-1).flatten(-2)


# ---- the rotation of a description, which may be a wrong one -------------------------------------


def frequencies_of_rule(rule: RotaryRule, length: Tensor | None = None) -> Tensor:
    """Return the angle of each pair for one token, in radians, (pairs,), float64.

    ``length`` is the number of tokens of a sequence, as in `Rotary.frequencies`.
    """
    if length is None or rule.scaling is None or not rule.scaling.depends_on_length:
        exact = _exact_frequencies(rule.theta, rule.width, rule.exponent_width, rule.scaling)
    else:
        arithmetic: Arithmetic = {"dtype": torch.float64, "length": length}
        arithmetic["exponent_width"] = rule.exponent_width
        exact = rule.scaling.scaled_frequencies(rule.theta, rule.width, **arithmetic)
    exact = exact if rule.dtype is None else exact.to(rule.dtype).double()
    return exact if rule.numbers is None else exact[..., list(rule.numbers)]


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


def rotate_by_rule(
    rule: RotaryRule, x: Tensor, positions: Tensor, length: Tensor | None = None
) -> Tensor:
    """Return (batch, heads, length, head_dim) rotated by positions, (batch, length).

    ``length`` is the number of tokens of each sequence, (batch, 1), for a scaling by it; positions
    may be (axes, batch, length).
    """
    angles = _places_of_pairs(rule, positions).double() * frequencies_of_rule(rule, length)
    angles = -angles if rule.backwards else angles
    return rotate_by_angles(rule, x, angles[:, None])


def rotate_by_angles(rule: RotaryRule, x: Tensor, angles: Tensor) -> Tensor:
    """Return ``x`` with the channels of each pair turned by ``angles`` (..., pairs)."""
    factors = _rotation_factors(angles, rule.amplitude, rule.pairing, rule.parts)
    return _apply_rotation(x, *factors, rule.pairing, rule.span, rule.parts)


# ---- checks and caches --------------------------------------------------------------------------


def _frequencies_on_device(rotary: Rotary, x: Tensor, length: Tensor | None) -> Tensor:
    """Return the frequencies on the device of ``x``, cached in eager mode and CUDA graphs."""
    if length is not None:
        return rotary.frequencies(x.shape[-1], device=x.device, length=length)
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


def _check_rotate_arguments(x: Tensor, positions: Tensor, axes: int) -> None:
    if x.dim() != 4:
        raise ShapeError(
            saw=f"x of shape {tuple(x.shape)}",
            needed="(batch, heads, length, head_dim)",
            do="split the heads first, e.g. x.unflatten(-1, (heads, head_dim)).transpose(1, 2)",
        )
    if not x.is_floating_point():
        raise DTypeError(saw=f"x of dtype {x.dtype}", needed="a float", do="e.g. x.float()")
    check_positions(positions, x.shape[0], x.shape[2], axes, x.device)


def check_positions(
    positions: object, batch: int, length: int, axes: int, device: torch.device
) -> None:
    """Raise unless positions are those of each token; floats may be coordinates in several axes.

    Raises:
        ShapeError: no tensor, or another shape than (length,), (batch, length) and, for several
            axes, (axes, batch, length).
        DTypeError: floats for one axis, or booleans.
        DeviceError: positions on another device.
    """
    shape = tuple(positions.shape) if isinstance(positions, Tensor) else ()
    # a last axis may turn no pair
    is_fit = len(shape) < 3 or (len(shape) == 3 and shape[0] >= axes > 1)
    is_fit = is_fit and bool(shape) and shape[-1] == length
    if not is_fit or (len(shape) > 1 and shape[-2] != batch and shape[-2] != 1):
        sections = f" or (axes {axes}, batch {batch}, length {length})" if axes > 1 else ""
        raise ShapeError(
            saw=f"positions of shape {shape}" if shape else f"positions={positions!r}",
            needed=f"(length {length},) or (batch {batch}, length {length}){sections}, for "
            f"{batch} x {length} tokens",
            do="pass one position for each token, e.g. torch.arange(length)",
        )
    assert isinstance(positions, Tensor)
    if positions.dtype == torch.bool or (positions.is_floating_point() and axes == 1):
        raise DTypeError(
            saw=f"positions of dtype {positions.dtype}",
            needed="whole numbers of tokens",
            do="e.g. torch.arange(length); to stretch positions, Rotary(scaling=...)",
        )
    if positions.device != device:
        raise DeviceError(
            saw=f"positions on {positions.device} for x on {device}",
            needed="one device",
            do=f'positions.to("{device}")',
        )
