"""What transformers' mask functions mean, read from the functions themselves.

transformers describes a mask by a function of (batch, head, query, key) that is a tree of a few
closures. A closure is known by its code object, and what it closes over are its parameters. Each
kind is compared with the installed version's own function once, before it is trusted: where a
version means something else by it, or lacks it, it is not recognised, and the mask gets written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils

from headwise.masks.mask import Mask

MaskFunction = Callable[..., Tensor]


@dataclass(frozen=True)
class TokenPositions:
    """Where the queries and keys of one call stand: the positions a mask function counts in.

    ``packed`` says that several sequences share a row; then ``position_ids`` (batch, queries) may
    say how each of them counts.
    """

    queries: int
    keys: int
    first_query: int = 0
    first_key: int = 0
    packed: bool = False
    position_ids: Tensor | None = None

    def positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Of the queries and of the keys, each (1 or batch, length)."""
        rows = torch.arange(self.first_query, self.first_query + self.queries, device=device)
        columns = torch.arange(self.first_key, self.first_key + self.keys, device=device)
        if self.position_ids is not None:
            return self.position_ids[:, rows], self.position_ids[:, columns]
        return rows[None], columns[None]

    def band(self, left: int | None, right: int | None) -> Mask | None:
        """Keys from ``left`` before to ``right`` after the query's position; None: no such `Mask`.

        Within a packed sequence, positions differ as places in the row do.
        """
        ahead = self.first_query - self.first_key  # the key that stands at query 0's position
        over = self.keys - self.queries - ahead  # keys behind the one at the last query's position
        mask = Mask()
        if left is not None:
            if max(left - ahead, left + over) < 0:
                return None
            mask &= (
                Mask.window(left - ahead, None, align="top-left")
                if left >= ahead
                else Mask.window(left + over, None, align="bottom-right")
            )
        if right is not None:
            if max(right + ahead, right - over) < 0:
                return None
            mask &= (
                Mask.window(None, right + ahead, align="top-left")
                if right + ahead >= 0
                else Mask.window(None, right - over, align="bottom-right")
            )
        return mask


def read(function: MaskFunction, place: TokenPositions) -> Mask | None:
    """The mask that a mask function describes; None where it is not one of the known."""
    return _read(function, place, known())


@cache
def known() -> dict[CodeType, Reader]:
    """The kinds of mask functions that mean what their reader says, by their code."""
    found: dict[CodeType, Reader] = {}
    for kind in _KINDS:
        example = kind.example()
        if example is not None:
            candidates = {**found, example.__code__: kind.reader}
            if all(_agrees(*case, candidates) for case in kind.cases(example)):
                found = candidates
    return found


# ---- readers, one for each kind of function ------------------------------------------------------


class _Node(NamedTuple):
    """A mask function: what it closes over, and where it is asked."""

    cells: dict[str, Any]
    place: TokenPositions
    readers: dict[CodeType, Reader]


Reader = Callable[[_Node], Mask | None]


def _read(
    function: MaskFunction, place: TokenPositions, readers: dict[CodeType, Reader]
) -> Mask | None:
    if not isinstance(function, FunctionType) or function.__code__ not in readers:
        return None
    names, closure = function.__code__.co_freevars, function.__closure__ or ()
    cells = {name: cell.cell_contents for name, cell in zip(names, closure, strict=True)}
    return readers[function.__code__](_Node(cells, place, readers))


def _everything(_: _Node) -> Mask | None:
    return Mask()


def _causal(node: _Node) -> Mask | None:
    return node.place.band(None, 0)


def _window(node: _Node) -> Mask | None:
    return node.place.band(node.cells["sliding_window"] - 1, None)


def _window_on_both_sides(node: _Node) -> Mask | None:
    return node.place.band(node.cells["sliding_window"], node.cells["sliding_window"])


def _chunks(node: _Node) -> Mask | None:
    size, start = node.cells["chunk_size"], node.cells["left_padding"][:, None]
    # Chunks of the padding count from below 0; a negative id would belong to no segment.
    ids = [(at - start) // size + start // size + 1 for at in node.place.positions(start.device)]
    return Mask.segments(*ids)


def _packed(node: _Node) -> Mask | None:
    ids = node.cells["packed_sequence_mask"]
    rows, columns = node.place.positions(ids.device)
    return Mask.segments(ids[:, rows[0]], ids[:, columns[0]])


def _remapped(node: _Node) -> Mask | None:
    place = node.place
    if not place.packed or (place.first_query, place.keys) != (place.first_key, place.queries):
        return None
    place = replace(place, position_ids=node.cells["position_ids"])
    return _read(node.cells["mask_function"], place, node.readers)


def _conjunction(node: _Node) -> Mask | None:
    functions = node.cells["mask_functions"]
    codes = [getattr(function, "__code__", None) for function in functions]
    packed = any(node.readers.get(code) is _packed for code in codes if code is not None)
    place = replace(node.place, packed=node.place.packed or packed)
    mask = Mask()
    for function in functions:
        part = _read(function, place, node.readers)
        if part is None:
            return None
        mask &= part
    return mask


# ---- which of them are trusted -------------------------------------------------------------------


def _on_cpu(values: list[Any]) -> Tensor:
    return torch.tensor(values, device="cpu")  # whatever device the caller has made the default


_IDS = _on_cpu([[0] * 5 + [1] * 4 + [2] * 3, [0] * 2 + [1] * 9 + [2]])
_POSITIONS = _on_cpu([[*range(5), *range(3, 7), *range(3)], [*range(2), *range(9), 0]])
_PADDING = _on_cpu([0, 3])
_SOME, _WHOLE = TokenPositions(7, 9, first_query=5, first_key=3), TokenPositions(12, 12)


class _Kind(NamedTuple):
    """A function of `transformers.masking_utils`, and what to call it with to get an example."""

    name: str
    arguments: tuple[Any, ...] | None
    reader: Reader

    def example(self) -> FunctionType | None:
        made = getattr(masking_utils, self.name, None)
        if made is not None and self.arguments is not None:
            try:
                made = made(*self.arguments)
            except TypeError:  # another version, another signature
                return None
        return made if isinstance(made, FunctionType) else None

    def cases(self, example: MaskFunction) -> Iterator[tuple[MaskFunction, TokenPositions]]:
        if self.reader is _remapped:  # means something within packed sequences only
            apart = masking_utils.packed_sequence_mask_function(_IDS)
            yield masking_utils.and_masks(apart, example), _WHOLE
        else:
            yield example, _SOME
            yield example, _WHOLE


_KINDS = (
    _Kind("causal_mask_function", None, _causal),
    _Kind("bidirectional_mask_function", None, _everything),
    _Kind("sliding_window_overlay", (4,), _window),
    _Kind("sliding_window_bidirectional_overlay", (3,), _window_on_both_sides),
    _Kind("chunked_overlay", (5, _PADDING), _chunks),
    _Kind("packed_sequence_mask_function", (_IDS,), _packed),
    _Kind(
        "and_masks",
        (masking_utils.bidirectional_mask_function, masking_utils.causal_mask_function),
        _conjunction,
    ),
    _Kind(
        "remap_positions_for_packed_sequence",
        (masking_utils.causal_mask_function, _POSITIONS),
        _remapped,
    ),
)


def _agrees(function: MaskFunction, place: TokenPositions, readers: dict[CodeType, Reader]) -> bool:
    """Whether a reader's mask is the one that the function describes, cell by cell."""
    mask = _read(function, place, readers)
    if mask is None:
        return False
    batch, device = len(_PADDING), _PADDING.device
    rows, columns = place.positions(device)
    described = function(
        torch.arange(batch, device=device)[:, None, None, None],
        torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device),
        rows[0][:, None],
        columns[0],
    )
    bound = mask.bind(batch=batch, heads=1, queries=place.queries, keys=place.keys, device=device)
    shape = (batch, 1, place.queries, place.keys)
    allowed = bound.at(torch.arange(place.queries, device=device))
    return torch.equal(allowed.expand(shape), described.expand(shape))
