"""Data that a cut is fitted to and measured on: in two parts, which share no sequence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from torch import Tensor

from headwise.errors import OptionError
from headwise.scanning.inputs import ModelInput, list_inputs, token_ids
from headwise.support.text import describe_count

ANOTHER_PART = "give other data: held_out=..., or more inputs"


@dataclass(frozen=True, eq=False)
class Data:
    """Inputs to choose and fit on, and inputs to measure on.

    Attributes:
        fit: a list of inputs, as for `headwise.scanning.importance.ablations`.
        held_out: a list of other inputs.
        note: the origin of the held-out inputs, as a sentence.
    """

    fit: list[Any]
    held_out: list[Any]
    note: str

    @classmethod
    def of(cls, inputs: Any, held_out: Any = None) -> Data:
        """Return the two parts; without ``held_out`` they are halves of the inputs.

        Several inputs are dealt out in turns. The sequences of a single one are halved.

        Raises:
            OptionError: a sequence is in both parts, or there is a single one.
        """
        given = [each.original for each in list_inputs(inputs)]
        if held_out is not None:
            others = [each.original for each in list_inputs(held_out)]
            data = cls(given, others, "the held-out inputs, which nothing was fitted to")
        elif len(given) > 1:
            data = cls(given[::2], given[1::2], "every second input held out")
        else:
            data = cls(*_halve(given[0]), "the second half of the sequences held out")
        data.require_apart()
        return data

    def require_apart(self) -> None:
        """Raise OptionError where a sequence is in both parts."""
        marks = {mark for value in self.fit for mark in _marks(value)}
        shared = sum(mark in marks for value in self.held_out for mark in _marks(value))
        if shared:
            raise OptionError(
                saw=f"{describe_count(shared, 'held-out sequence')} that the cut is fitted to, too",
                needed="other sequences to measure on than to fit to",
                do="leave each sequence out of one of the two, or give each once",
            )


def _halve(value: Any) -> tuple[list[Any], list[Any]]:
    count = _batch(value)
    if count < 2:
        raise OptionError(
            saw="one sequence, of which no half can be held out",
            needed="at least two sequences: to fit to, and to measure on",
            do=ANOTHER_PART,
        )
    halves = slice(0, count // 2), slice(count // 2, None)
    first, second = ([_rows(value, half, count)] for half in halves)
    return first, second


def _rows(value: Any, rows: slice, count: int) -> Any:
    """Return these sequences of an input: of every tensor as long as its batch."""
    if isinstance(value, Mapping):
        return {name: _rows(part, rows, count) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_rows(part, rows, count) for part in value)
    return value[rows] if isinstance(value, Tensor) and value.shape[:1] == (count,) else value


def _main_tensor(given: ModelInput) -> Tensor | None:
    parts = (*given.positional, *given.named.values())
    first = next((part for part in parts if isinstance(part, Tensor) and part.dim() > 1), None)
    ids = token_ids(given)
    return first if ids is None else ids


def _batch(value: Any) -> int:
    main = _main_tensor(list_inputs(value)[0])
    return 0 if main is None else len(main)


def _marks(value: Any) -> Iterator[bytes]:
    """Yield a digest of each sequence, without the padding that ``attention_mask`` names."""
    given = list_inputs(value)[0]
    main, mask = _main_tensor(given), given.named.get("attention_mask")
    if main is None:
        return
    for number, row in enumerate(main):
        if isinstance(mask, Tensor) and mask.shape == main.shape:
            row = row[mask[number].bool()]
        yield sha256(row.detach().cpu().contiguous().numpy().tobytes()).digest()
