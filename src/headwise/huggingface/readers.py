"""Translation of transformers' mask functions to `Mask` objects.

transformers describes a mask by a function of (batch, head, query, key), built from a few kinds of
closures. The code object of a closure identifies its kind, and the cells hold its parameters. Each
reader is checked once against the installed version's function. If a version lacks a function, or
its function differs, the reader is not used, and the mask becomes a dense tensor.
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
    """Positions of the queries and keys of a call, as a mask function counts them.

    ``packed`` is True if several sequences share a row; ``position_ids`` (batch, queries) may then
    hold the positions within each sequence.
    """

    queries: int
    keys: int
    first_query: int = 0
    first_key: int = 0
    packed: bool = False
    position_ids: Tensor | None = None

    def positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the positions of queries and keys, each (1 or batch, length)."""
        rows = torch.arange(self.first_query, self.first_query + self.queries, device=device)
        columns = torch.arange(self.first_key, self.first_key + self.keys, device=device)
        if self.position_ids is not None:
            return self.position_ids[:, rows], self.position_ids[:, columns]
        return rows[None], columns[None]

    def band(self, left: int | None, right: int | None) -> Mask | None:
        """Return a mask of keys from ``left`` before to ``right`` after the query, or None.

        Within a packed sequence, position differences equal differences in the row.
        """
        ahead = self.first_query - self.first_key  # index of the key at query 0's position
        over = self.keys - self.queries - ahead  # keys after the last query's position
        mask = Mask()
        sides = (("left", left, -ahead, over), ("right", right, ahead, -over))
        for side, reach, from_first, from_last in sides:
            if reach is None:
                continue
            if max(reach + from_first, reach + from_last) < 0:
                return None
            limits: dict[str, Any] = {"left": None, "right": None, "align": "bottom-right"}
            limits[side] = reach + from_last
            if reach + from_first >= 0:
                limits |= {side: reach + from_first, "align": "top-left"}
            mask &= Mask.window(**limits)
        return mask


@cache
def select_trusted_readers() -> dict[CodeType, Reader]:
    """Return the readers that agree with the installed transformers, by code object."""
    readers: dict[CodeType, Reader] = {}
    for kind in _KINDS:
        example = kind.example()
        if example is not None:
            candidates = {**readers, example.__code__: kind.reader}
            if all(_reader_agrees(*case, candidates) for case in kind.cases(example)):
                readers = candidates
    return readers


class _Node(NamedTuple):
    """The closure cells of a mask function, and the positions of the call."""

    cells: dict[str, Any]
    tokens: TokenPositions
    readers: dict[CodeType, Reader]


Reader = Callable[[_Node], Mask | None]


def read_mask_function(
    function: MaskFunction, tokens: TokenPositions, readers: dict[CodeType, Reader] | None = None
) -> Mask | None:
    """Return the mask that a mask function describes, or None for an unknown function."""
    readers = select_trusted_readers() if readers is None else readers
    if not isinstance(function, FunctionType) or function.__code__ not in readers:
        return None
    names, closure = function.__code__.co_freevars, function.__closure__ or ()
    cells = {name: cell.cell_contents for name, cell in zip(names, closure, strict=True)}
    return readers[function.__code__](_Node(cells, tokens, readers))


def _read_window(node: _Node) -> Mask | None:
    return node.tokens.band(node.cells["sliding_window"] - 1, None)


def _read_symmetric_window(node: _Node) -> Mask | None:
    return node.tokens.band(node.cells["sliding_window"], node.cells["sliding_window"])


def _read_chunk_segments(node: _Node) -> Mask | None:
    size, start = node.cells["chunk_size"], node.cells["left_padding"][:, None]
    # Chunks in the padding have negative numbers, and segment ids must not be negative.
    positions = node.tokens.positions(start.device)
    return Mask.segments(*((each - start) // size + start // size + 1 for each in positions))


def _read_packed_segments(node: _Node) -> Mask | None:
    ids = node.cells["packed_sequence_mask"]
    rows, columns = node.tokens.positions(ids.device)
    return Mask.segments(ids[:, rows[0]], ids[:, columns[0]])


def _read_remapped_positions(node: _Node) -> Mask | None:
    tokens = node.tokens
    if not tokens.packed or (tokens.first_query, tokens.keys) != (tokens.first_key, tokens.queries):
        return None
    tokens = replace(tokens, position_ids=node.cells["position_ids"])
    return read_mask_function(node.cells["mask_function"], tokens, node.readers)


def _read_conjunction(node: _Node) -> Mask | None:
    functions = node.cells["mask_functions"]
    codes = [function.__code__ for function in functions if hasattr(function, "__code__")]
    packed = any(node.readers.get(code) is _read_packed_segments for code in codes)
    tokens = replace(node.tokens, packed=node.tokens.packed or packed)
    mask = Mask()
    for function in functions:
        if (part := read_mask_function(function, tokens, node.readers)) is None:
            return None
        mask &= part
    return mask


def _make_cpu_tensor(values: list[Any]) -> Tensor:
    return torch.tensor(values, device="cpu")  # independent of the default device


_SEQUENCE_IDS = _make_cpu_tensor([[0] * 5 + [1] * 4 + [2] * 3, [0] * 2 + [1] * 9 + [2]])
_POSITIONS = _make_cpu_tensor([[*range(5), *range(3, 7), *range(3)], [*range(2), *range(9), 0]])
_PADDING = _make_cpu_tensor([0, 3])
_CACHED, _FULL = TokenPositions(7, 9, first_query=5, first_key=3), TokenPositions(12, 12)


class _KnownMaskFunction(NamedTuple):
    """A function of `transformers.masking_utils`, and arguments that make an example of it."""

    name: str
    arguments: tuple[Any, ...] | None
    reader: Reader

    def example(self) -> FunctionType | None:
        function = getattr(masking_utils, self.name, None)
        if function is not None and self.arguments is not None:
            try:
                function = function(*self.arguments)
            except TypeError:  # another version has another signature
                return None
        return function if isinstance(function, FunctionType) else None

    def cases(self, example: MaskFunction) -> Iterator[tuple[MaskFunction, TokenPositions]]:
        if self.reader is _read_remapped_positions:  # valid only within packed sequences
            packed = masking_utils.packed_sequence_mask_function(_SEQUENCE_IDS)
            yield masking_utils.and_masks(packed, example), _FULL
        else:
            yield example, _CACHED
            yield example, _FULL


_KINDS = (
    _KnownMaskFunction("causal_mask_function", None, lambda node: node.tokens.band(None, 0)),
    _KnownMaskFunction("bidirectional_mask_function", None, lambda _: Mask()),
    _KnownMaskFunction("sliding_window_overlay", (4,), _read_window),
    _KnownMaskFunction("sliding_window_bidirectional_overlay", (3,), _read_symmetric_window),
    _KnownMaskFunction("chunked_overlay", (5, _PADDING), _read_chunk_segments),
    _KnownMaskFunction("packed_sequence_mask_function", (_SEQUENCE_IDS,), _read_packed_segments),
    _KnownMaskFunction(
        "and_masks",
        (masking_utils.bidirectional_mask_function, masking_utils.causal_mask_function),
        _read_conjunction,
    ),
    _KnownMaskFunction(
        "remap_positions_for_packed_sequence",
        (masking_utils.causal_mask_function, _POSITIONS),
        _read_remapped_positions,
    ),
)


def _reader_agrees(
    function: MaskFunction, tokens: TokenPositions, readers: dict[CodeType, Reader]
) -> bool:
    if (mask := read_mask_function(function, tokens, readers)) is None:
        return False
    batch, device = len(_PADDING), _PADDING.device
    rows, columns = tokens.positions(device)
    sequence = torch.arange(batch, device=device)[:, None, None, None]
    described = function(sequence, sequence[:1], rows[0][:, None], columns[0])
    bound = mask.bind(batch=batch, heads=1, queries=tokens.queries, keys=tokens.keys, device=device)
    shape = (batch, 1, tokens.queries, tokens.keys)
    allowed = bound.evaluate_rows(torch.arange(tokens.queries, device=device))
    return torch.equal(allowed.expand(shape), described.expand(shape))
