"""Labels of rows: equal labels for equal numbers, or for numbers that are equal up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor

from headwise.diagnosis.moves.maps import MatrixMap, Rows, RowSizes
from headwise.support.tensors import view_as_bits

_BLOCK = 1 << 20  # entries that are widened to int64 at a time
_SEED = 16
_MULTIPLIER = -7046029254386353131


def make_multipliers(count: int, seed: int = 0) -> Tensor:
    """Return random odd numbers to multiply bits by, the first ones equal for every count.

    Returns:
        (count), int64.
    """
    generator = torch.Generator().manual_seed(_SEED + seed)
    return torch.randint(-(2**62), 2**62, (count,), generator=generator) * 2 + 1


def mix_bits(labels: Tensor) -> Tensor:
    """Return labels whose bits depend on all bits of the given ones."""
    labels = (labels ^ (labels >> 29)) * _MULTIPLIER
    return (labels ^ (labels >> 32)) * _MULTIPLIER


def read_bits(x: Tensor) -> Tensor:
    """Return the bits of each entry as integers; -0 counts as 0, float8 excepted."""
    return view_as_bits(x + 0.0 if x.dtype.itemsize > 1 else x)


def hash_rows(rows: Tensor) -> Tensor:
    """Return one hash for each row (rows, columns); (rows), int64."""
    multipliers = make_multipliers(rows.shape[1])
    step = max(1, _BLOCK // max(1, rows.shape[1]))
    blocks = (read_bits(block).to(torch.int64) for block in rows.split(step))
    return mix_bits(torch.cat([(bits * multipliers).sum(1) for bits in blocks]))


def hash_sequences(labels: Tensor, weights: Tensor) -> Tensor:
    """Return one hash for each sequence of labels (sequences, rows), int64.

    ``weights`` are numbers of the rows; 0 for a row that does not count.
    """
    return (labels * weights).sum(-1)


@dataclass
class Labelled:
    """Labels of the rows of each role, and of the rows of its matrix read with exchanged axes."""

    sizes: RowSizes
    plain: Tensor  # (rows of all roles), int64
    # Role, and whether the map is reversed -> the labels of the role after it.
    by_map: Mapping[tuple[str, bool], Tensor] = field(default_factory=dict)

    def labels_after_map(self, matrix_map: MatrixMap, *, undone: bool = False) -> Tensor:
        """Return the labels of all rows after a map of matrices, or before it."""
        labels, spans = self.plain.clone(), self.sizes.spans()
        for role in matrix_map.roles:
            labels[spans[role]] = self.by_map[role, matrix_map.is_reversed != undone]
        return labels


_Parts = dict[tuple[str, bool | None], Tensor]  # of a role as it is, or after a map of its matrix


def label_rows(
    a: Rows,
    b: Rows,
    sizes: RowSizes,
    matrix_maps: Sequence[MatrixMap],
    label: Callable[[_Parts, _Parts], tuple[_Parts, _Parts]],
) -> tuple[Labelled, Labelled]:
    """Return labels of a's and of b's rows, as they are and with matrices read otherwise."""
    ours, theirs = (
        _Parts({(role, None): rows.matrix_of_role(role) for role in sizes.roles}) for rows in (a, b)
    )
    for each in matrix_maps:
        if len(each.roles) == 1:
            [role] = each.roles
            theirs[role, each.is_reversed] = each.apply(b).matrix_of_role(role)
            if each.given is None:
                turned = each.apply(a, undone=True)
                ours[role, not each.is_reversed] = turned.matrix_of_role(role)
    labels_a, labels_b = (
        Labelled(
            sizes,
            torch.cat([labels[role, None] for role in sizes.roles]),
            {(role, way): x for (role, way), x in labels.items() if way is not None},
        )
        for labels in label(ours, theirs)
    )
    return labels_a, labels_b


def label_bits(
    ours: _Parts, theirs: _Parts, *, dtype: torch.dtype | None = None
) -> tuple[_Parts, _Parts]:
    """Return labels of the bits of each part, after a rounding to ``dtype``."""
    a, b = (
        _Parts({key: hash_rows(x if dtype is None else x.to(dtype)) for key, x in parts.items()})
        for parts in (ours, theirs)
    )
    return a, b


def list_matrix_maps(rows: Rows, sizes: RowSizes, given: Rows | None = None) -> list[MatrixMap]:
    """Return the maps of matrices for these rows, those of the fewest roles first.

    ``given`` are the rows with matrices transposed, if they cannot be computed.
    """
    square = rows.list_square_roles() if given is None else given.roles
    maps = [
        MatrixMap(roles, is_square=True, given=given)
        for count in range(1, len(square) + 1)
        for roles in combinations(square, count)
    ]
    for role in sizes.roles if given is None else ():
        if role not in square and min(rows.matrix_of_role(role).shape) > 1:
            maps += [MatrixMap((role,), is_square=False, is_reversed=x) for x in (False, True)]
    return maps


DIMENSIONS = 64
LEAST_COSINE = 0.95
_ROWS_AT_ONCE = 1024
_ZERO = -1  # label of a row of zeros
_UNKNOWN = -2  # the first label of rows that are near to none
_SAME = 1e-13  # 1 - cosine of rows that are parallel in float64
_WIDEST = 1e-2  # the largest distance at which right rows can count as parallel


def label_directions(ours: _Parts, theirs: _Parts) -> tuple[_Parts, _Parts]:
    """Return labels of the directions of rows; parts of other widths share none."""
    labels: tuple[_Parts, _Parts] = ({}, {})
    start = 0
    for width in dict.fromkeys(part.shape[1] for part in (*ours.values(), *theirs.values())):
        sides = [
            {key: part for key, part in parts.items() if part.shape[1] == width}
            for parts in (ours, theirs)
        ]
        directions = [_project_and_normalise_rows([*parts.values()], width) for parts in sides]
        nearest = _label_nearest_directions(*directions, start=start)
        start += sum(map(len, directions))
        for side, (parts, near) in enumerate(zip(sides, nearest, strict=True)):
            lengths = [len(part) for part in parts.values()]
            labels[side].update(zip(parts, near.split(lengths), strict=True))
    return labels


def _project_and_normalise_rows(parts: list[Tensor], columns: int) -> Tensor:
    """Return rows of length 1 in at most 64 dimensions; rows of zeros stay zero."""
    if not parts:
        return torch.zeros(0, min(columns, DIMENSIONS), dtype=torch.float64)
    projection = None
    if columns > DIMENSIONS:
        generator = torch.Generator().manual_seed(columns)
        projection = torch.randn(columns, DIMENSIONS, generator=generator, dtype=torch.float64)
    projected = []
    for part in parts:
        for block in part.split(_ROWS_AT_ONCE):
            rows = block.to(torch.float64)
            largest = rows.abs().amax(1, keepdim=True)
            rows = rows / largest.where(largest > 0, 1.0)
            projected.append(rows if projection is None else rows @ projection)
    return torch.nn.functional.normalize(torch.cat(projected), dim=1)


def _label_nearest_directions(ours: Tensor, theirs: Tensor, *, start: int) -> tuple[Tensor, Tensor]:
    """Return labels from ``start`` on for directions; equal labels for those that are parallel."""
    nearest, apart = _find_nearest_rows(ours, theirs)
    known = apart < 1 - LEAST_COSINE
    noise = float(apart[known].quantile(0.9)) if bool(known.any()) else 0.0
    parallel = min(_WIDEST, max(_SAME, 4 * noise))
    first = torch.arange(len(theirs))
    for place in range(0, len(theirs), _ROWS_AT_ONCE):
        block = theirs[place : place + _ROWS_AT_ONCE]
        same = 1 - (block @ theirs.T).abs() <= parallel
        # The first of all parallel rows stands for them.
        first[place : place + len(block)] = same.to(torch.uint8).argmax(1)
    right = first + start
    right[~theirs.any(1)] = _ZERO
    unknown = _UNKNOWN - start - torch.arange(len(ours))
    found_in = right[nearest] if len(theirs) else unknown
    labels = found_in.where(known, unknown)
    labels[~ours.any(1)] = _ZERO
    return labels, right


def _find_nearest_rows(ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest right row of each row, and 1 - |cosine|."""
    nearest = torch.zeros(len(ours), dtype=torch.int64)
    apart = torch.ones(len(ours), dtype=torch.float64)
    for place in range(0, len(ours) if len(theirs) else 0, _ROWS_AT_ONCE):
        block = ours[place : place + _ROWS_AT_ONCE]
        best = (block @ theirs.T).abs().max(1)
        nearest[place : place + len(block)] = best.indices
        apart[place : place + len(block)] = 1 - best.values
    return nearest, apart
