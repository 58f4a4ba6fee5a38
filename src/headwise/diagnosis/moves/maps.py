"""Named maps of rows, and the maps that two orders of storage make.

A map says for each row of a which row of b it is. Most maps are a pair of patterns of the layout
language: b's rows are stored in the first order, and a is read in the second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headwise.diagnosis.catalogue import (
    MATRIX_TRANSPOSED,
    OUTPUT_RESHAPED,
    PROJECTION_RESHAPED,
    Cause,
)
from headwise.diagnosis.moves.rows import ROLES, Rows, RowSizes
from headwise.layouts.pattern import GROUPED, Splits, pack_tensors, parse_pattern, unpack_tensor

TENSORS = {"q": "wq", "k": "wk", "v": "wv", "o": "wo"}
_ROLE_OF = {tensor: role for role, tensor in TENSORS.items()}


@dataclass(frozen=True)
class MapName:
    """Name of a map.

    Attributes:
        cause: the mistake that makes this map.
        text: the mistake in words, with its parameters.
        roles: the projections whose rows move.
        order: 0 for the most usual mistakes.
        parameters: such as the number of heads that was used.
    """

    cause: Cause
    text: str
    roles: tuple[str, ...]
    order: int = 0
    parameters: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"{self.cause.name}: {self.text}" if self.text else self.cause.name

    @property
    def repair(self) -> str:
        """The repair in words."""
        weights, biases = (", ".join(f"{kind}{role}" for role in self.roles) for kind in "wb")
        return self.cause.remedy.format(weights=weights, biases=biases, text=self.text, move=self)


@dataclass(frozen=True, eq=False)
class RowMap:
    """A map of rows: row i of all roles becomes row ``index[i]``.

    Attributes:
        names: the simplest first; the others make the same map at these sizes.
        index: (rows of all roles), int64.
        is_permutation: True if each row is taken once.
        space: the roles whose rows the index counts.
    """

    names: tuple[MapName, ...]
    index: Tensor
    is_permutation: bool
    space: tuple[str, ...] = ROLES

    def index_over_roles(self, sizes: RowSizes) -> Tensor:
        """Return the index among the rows of more roles, where the others stay."""
        if self.space == sizes.roles:
            return self.index
        whole = torch.arange(sizes.total_rows)
        places = torch.cat([whole[sizes.spans()[role]] for role in self.space])
        whole[places] = places[self.index]
        return whole

    def inverse_index(self) -> Tensor:
        """Return the index of the inverse of a permutation."""
        inverse = torch.empty_like(self.index)
        inverse[self.index] = torch.arange(len(self.index))
        return inverse


Draft = tuple[MapName, dict[str, Tensor]]  # the rows that each moved role takes, of all four roles


def sizes_with_all_roles(sizes: RowSizes) -> RowSizes:
    """Return the sizes with all four roles."""
    return replace(sizes, roles=ROLES)


def lengths_of_pattern_names(sizes: RowSizes, **more: int) -> dict[str, int]:
    """Return a length for each name of a pattern; the columns of a row count as one."""
    group = sizes.heads // sizes.kv_heads if sizes.heads % sizes.kv_heads == 0 else 1
    return {
        "heads": sizes.heads,
        "kv_heads": sizes.kv_heads,
        "group": group,
        "head_dim": sizes.head_dim,
        "value_dim": sizes.value_dim,
        "embed_dim": 1,
        "out_dim": 1,
        **more,
    }


def number_rows_by_role(sizes: RowSizes) -> dict[str, Tensor]:
    """Return the index of each row of each role, as the canonical tensors of one column."""
    whole = sizes_with_all_roles(sizes)
    return {
        role: torch.arange(span.start, span.stop).view(
            whole.count_heads(role), whole.count_channels(role), 1
        )
        for role, span in whole.spans().items()
    }


def order_rows_by_pattern(
    pattern: str, sizes: RowSizes, lengths: Mapping[str, int], splits: Splits = GROUPED
) -> Tensor:
    """Return the indices of rows in the order of a pattern; (rows)."""
    indices = {TENSORS[role]: index for role, index in number_rows_by_role(sizes).items()}
    return pack_tensors(parse_pattern(pattern), indices, lengths, splits).flatten()


def read_rows_by_pattern(
    pattern: str, rows: Tensor, lengths: Mapping[str, int], splits: Splits = GROUPED
) -> dict[str, Tensor]:
    """Return, for each role of a pattern, the rows that it takes where they are read so."""
    parsed = parse_pattern(pattern)
    canonical = unpack_tensor(parsed, rows.view(parsed.shape(lengths)), lengths, splits)
    return {_ROLE_OF[tensor]: x.flatten() for tensor, x in canonical.items()}


def make_distinct_maps(
    drafts: Iterable[Draft], sizes: RowSizes, columns: tuple[int, ...]
) -> tuple[RowMap, ...]:
    """Return one map for each distinct draft, the simplest names first.

    Drafts that move nothing at these sizes, or that need a role that is absent or has other
    columns, are left out.
    """
    whole = sizes_with_all_roles(sizes)
    spans, kept = whole.spans(), _row_numbers_without_absent_roles(sizes)
    width = {role: columns[sizes.roles.index(role)] for role in sizes.roles}
    still = torch.arange(sizes.total_rows)
    names: dict[bytes, list[MapName]] = {}
    indices: dict[bytes, Tensor] = {}
    for name, moved in drafts:
        moved = {role: index for role, index in moved.items() if role in sizes.roles}
        if not _fits_present_rows(moved, spans, width):
            continue
        index = torch.arange(whole.total_rows)
        for role, taken in moved.items():
            index[spans[role]] = taken
        index = kept[index[kept >= 0]]
        if torch.equal(index, still):
            continue
        key = index.numpy().tobytes()
        indices[key] = index
        roles = tuple(r for r, s in sizes.spans().items() if not torch.equal(index[s], still[s]))
        names.setdefault(key, []).append(replace(name, roles=roles))
    maps = [
        RowMap(
            tuple(sorted(names[key], key=lambda name: name.order)),
            index,
            bool((torch.bincount(index, minlength=sizes.total_rows) == 1).all()),
            sizes.roles,
        )
        for key, index in indices.items()
    ]
    return tuple(sorted(maps, key=lambda row_map: row_map.names[0].order))


def _row_numbers_without_absent_roles(sizes: RowSizes) -> Tensor:
    """Return, for each row of all four roles, its index among those that are there, or -1."""
    whole = sizes_with_all_roles(sizes)
    kept = torch.full((whole.total_rows,), -1)
    spans = whole.spans()
    for role, span in sizes.spans().items():
        kept[spans[role]] = torch.arange(span.start, span.stop)
    return kept


def _fits_present_rows(
    moved: Mapping[str, Tensor], spans: Mapping[str, slice], width: Mapping[str, int]
) -> bool:
    """True if every role takes rows of roles that are there, with as many columns."""
    if len(width) == len(spans) and len(set(width.values())) == 1:
        return bool(moved)
    for role, index in moved.items():
        for source, span in spans.items():
            reads = bool(((index >= span.start) & (index < span.stop)).any())
            if reads and width.get(source) != width[role]:
                return False
    return bool(moved)


TRANSPOSED_ORDER, RESHAPED_ORDER = 80, 700


@dataclass(frozen=True, eq=False)
class MatrixMap:
    """A matrix of (rows, columns) is stored transposed, and read without a transposition.

    A square matrix comes out transposed. Any other is cut into rows of another length.

    Attributes:
        roles: the projections whose matrices are read so.
        is_reversed: True if the stored matrix is cut first and transposed afterwards.
        given: the rows with every such matrix transposed, where they cannot be computed:
            activations. Such a map cannot be undone.
    """

    roles: tuple[str, ...]
    is_square: bool
    is_reversed: bool = False
    given: Rows | None = None

    @property
    def names(self) -> tuple[MapName, ...]:
        """The name of the mistake, as for a map of rows."""
        if self.is_square:
            order = TRANSPOSED_ORDER + (0 if len(self.roles) == 1 else 5 - len(self.roles))
            return (MapName(MATRIX_TRANSPOSED, "", self.roles, order),)
        text = "cut, then transposed" if self.is_reversed else "transposed, then cut"
        cause = OUTPUT_RESHAPED if self.roles == ("o",) else PROJECTION_RESHAPED
        return (MapName(cause, text, self.roles, RESHAPED_ORDER),)

    def apply(self, rows: Rows) -> Rows:
        """Return rows with these matrices read so; biases stay."""
        if self.given is not None:
            taken = {role: self.given.matrices[role] for role in self.roles}
            return Rows({**rows.matrices, **taken}, rows.biases)
        return self._reread_rows(rows, is_reversed=self.is_reversed)

    def undo(self, rows: Rows) -> Rows:
        """Return the rows that `apply` makes these of."""
        return self._reread_rows(rows, is_reversed=not self.is_reversed)

    def _reread_rows(self, rows: Rows, *, is_reversed: bool) -> Rows:
        matrices = dict(rows.matrices)
        for role in self.roles:
            matrices[role] = transpose_into_same_shape(
                rows.matrix_of_role(role), is_reversed=is_reversed
            ).view_as(rows.matrices[role])
        return Rows(matrices, rows.biases)


def transpose_into_same_shape(matrix: Tensor, *, is_reversed: bool) -> Tensor:
    """Return a matrix of the same shape whose entries were stored or read with exchanged axes.

    Args:
        matrix: (rows, columns).
        is_reversed: True to cut first and transpose afterwards.
    """
    rows, columns = matrix.shape
    if is_reversed:
        return matrix.reshape(columns, rows).T.contiguous()
    return matrix.T.reshape(rows, columns)
