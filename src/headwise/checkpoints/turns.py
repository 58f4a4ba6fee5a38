"""Places of tokens that a class of transformers hands to its attention, and the rotation by them.

Vision towers count rows and columns in their own order, and pack images into one sequence. A run
of the class shows both: the places and the angles that its rotation made of them, the angles that
the attention got, and where the images begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.function.rotary import frequencies_of_rule
from headwise.function.spec import Pairing, RotaryRule

MOST_AXES = 4
# Orders of the two channels of a pair in a table of angles: the pairing, and its equal parts.
_ORDERS: tuple[tuple[Pairing, int], ...] = (
    ("half-split", 1),
    ("interleaved", 1),
    ("half-split", 2),
)


@dataclass(frozen=True, eq=False)
class Turn:
    """Angles that an attention got, with the places of which they were made.

    Attributes:
        places: (axes, rows), such as the row and the column of each token.
        angles: (rows, width), cosine and sine of each channel as a complex number.
    """

    places: Tensor
    angles: Tensor

    def positions(self, batch: int, tokens: int) -> Tensor | None:
        """Return the places as (axes, batch, tokens); None where they are of other tokens."""
        if self.places.shape[1] not in (tokens, batch * tokens):
            return None
        positions: Tensor = self.places.unflatten(1, (-1, tokens)).expand(-1, batch, -1)
        return positions


@dataclass(eq=False)
class HandedPlaces:
    """Arguments of one attention, and the places and angles of a model, kept in a run.

    Attributes:
        made: places of (axes, rows), and the angles that a rotation in the model made of them.
        handed: arguments of the attention.
    """

    made: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    handed: list[Any] = field(default_factory=list)

    @contextmanager
    def keep(self, model: nn.Module, attention: nn.Module) -> Iterator[None]:
        """Keep what is handed to an attention of a model."""

        def keep_made(_: nn.Module, args: Any, named: Mapping[str, Any], result: Any) -> None:
            if (angles := _join(result)) is not None:
                given = (x for x in (*args, *named.values()) if isinstance(x, Tensor))
                each = (_with_axes_first(x, len(angles)) for x in given)
                self.made += [(places, angles) for places in each if places is not None]

        def keep_handed(_: nn.Module, args: Any, named: Mapping[str, Any]) -> None:
            self.handed = [*args, *named.values()]

        rotations = (m for m in model.modules() if isinstance(getattr(m, "inv_freq", None), Tensor))
        hooks = [m.register_forward_hook(keep_made, with_kwargs=True) for m in rotations]
        hooks.append(attention.register_forward_pre_hook(keep_handed, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def find_turn(self) -> Turn | None:
        """Return the angles with their places; None where none of several axes made them."""
        for handed in (x for x in map(_join, self.handed) if x is not None):
            for places, made in self.made:
                if made.shape[1] == handed.shape[1]:
                    is_same = (handed[:, None] == made).all(-1)  # windows have their own order
                    if is_same.any(1).all():
                        return Turn(places[:, is_same.int().argmax(1)], handed)
        return None

    def find_images(self, tokens: int) -> Tensor | None:
        """Return the number of the image of each token, where the attention got their lengths."""
        for x in self.handed:
            is_list = isinstance(x, Tensor) and x.dim() == 1 and not x.is_floating_point()
            if is_list and len(x) > 1 and x[0] == 0 and x[-1] == tokens and (x.diff() >= 0).all():
                return torch.arange(len(x) - 1).repeat_interleave(x.diff().long())
        return None


def _join(value: Any) -> Tensor | None:
    """Return a pair of cosines and sines as complex numbers, (rows, width); None for no pair."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        return None
    cos, sin = value
    if not isinstance(cos, Tensor) or not isinstance(sin, Tensor) or cos.shape != sin.shape:
        return None
    if cos.dim() < 2 or not cos.is_floating_point():
        return None
    return torch.complex(cos.double(), sin.double()).flatten(0, -2)


def _with_axes_first(places: Tensor, rows: int) -> Tensor | None:
    """Return places as (axes, rows); None where each token has one."""
    last, first = places.shape[-1], places.shape[0]
    if 1 < last <= MOST_AXES and places.numel() == last * rows:
        return places.reshape(rows, last).mT
    if 1 < first <= MOST_AXES and places.numel() == first * rows:
        return places.reshape(first, rows)
    return None


def fit_rotation(turns: Iterable[Turn], theta: float) -> RotaryRule | None:
    """Return the rotation that made these angles; None where none of this theta did.

    A pair turns by theta ** (-2n / width) for each step along one axis: the n and the axis are
    those that give its angles at all places, if no other ones do.
    """
    every = [*turns]
    if not every or len({(len(t.places), t.angles.shape[1]) for t in every}) > 1:
        return None
    places = torch.cat([turn.places for turn in every], 1).double()
    pairs = _find_pairs(torch.cat([turn.angles for turn in every]))
    if pairs is None:
        return None
    rule, angles = replace(pairs[0], theta=theta), pairs[1]
    frequencies = frequencies_of_rule(rule)
    tried = (places[..., None] * frequencies).movedim(0, 1).flatten(1)
    gaps = (torch.polar(torch.ones_like(tried), tried)[:, None] - angles[..., None]).abs().amax(0)
    count = len(frequencies)
    # The frequencies of a class are float32.
    fits = gaps < (places.abs().max() * frequencies / 2**22).repeat(len(places))
    if not (fits.sum(1) == 1).all():
        return None
    first = fits.int().argmax(1).tolist()
    numbers = tuple(n % count for n in first)
    is_usual = numbers == (*range(count),)  # as those of a text, whose tokens may count
    axes = tuple(n // count for n in first)
    return replace(rule, axes=axes, numbers=None if is_usual else numbers)


def _find_pairs(angles: Tensor) -> tuple[RotaryRule, Tensor] | None:
    """Return the order of pairs in angles of all channels, and the angles of the pairs."""
    width = angles.shape[1]
    for pairing, parts in _ORDERS if width % 4 == 0 else _ORDERS[:2] if width % 2 == 0 else ():
        split = (parts, 2, -1) if pairing == "half-split" else (1, -1, 2)
        first, second = angles.unflatten(1, split).unbind(2 if pairing == "half-split" else 3)
        if torch.equal(first, second):
            return RotaryRule(1.0, width, pairing, scaling=None, parts=parts), first.flatten(1)
    return None
