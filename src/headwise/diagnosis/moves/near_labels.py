"""Labels of rows that are equal up to rounding, a sign and a factor.

A row's label is its nearest right row by the absolute cosine, after a random projection to 64
dimensions. Labels of right rows that are parallel are equal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.diagnosis.moves.matrix_map import MatrixMap
from headwise.diagnosis.moves.row_labels_by_content import Labelled
from headwise.diagnosis.moves.rows_of_all_projections import Rows, RowSizes

DIMENSIONS = 64
LEAST_COSINE = 0.95
_BLOCK = 1024
_ZERO = -1  # label of a row of zeros
_UNKNOWN = -2  # the first label of rows that are near to none
_SAME = 1e-13  # 1 - cosine of rows that are parallel in float64
_WIDEST = 1e-2  # the largest distance at which right rows can count as parallel


def label_near_rows(
    a: Rows, b: Rows, sizes: RowSizes, matrix_maps: Sequence[MatrixMap]
) -> tuple[Labelled, Labelled]:
    """Return labels of a's and of b's rows, as they are and with matrices read otherwise."""
    asked = {(m.roles, m.is_reversed): m for m in matrix_maps if len(m.roles) == 1}
    sides: list[dict[tuple[str, bool | None], Tensor]] = []
    for rows in (a, b):
        parts: dict[tuple[str, bool | None], Tensor] = {
            (r, None): rows.matrix_of_role(r) for r in sizes.roles
        }
        for ([role], is_reversed), matrix_map in asked.items():
            if rows is b:
                parts[role, is_reversed] = matrix_map.apply(rows).matrix_of_role(role)
            elif matrix_map.given is None:
                parts[role, not is_reversed] = matrix_map.undo(rows).matrix_of_role(role)
        sides.append(parts)
    ours, theirs = sides
    labels_a, labels_b = _label_parts(ours, theirs)
    return _collect_labels(labels_a, sizes), _collect_labels(labels_b, sizes)


def _collect_labels(labels: dict[tuple[str, bool | None], Tensor], sizes: RowSizes) -> Labelled:
    plain = torch.cat([labels[role, None] for role in sizes.roles])
    by_map = {(role, way): x for (role, way), x in labels.items() if way is not None}
    return Labelled(sizes, plain, by_map)


_Parts = dict[tuple[str, bool | None], Tensor]


def _label_parts(ours: _Parts, theirs: _Parts) -> tuple[_Parts, _Parts]:
    """Return labels of each part of both sides; parts of other widths share none."""
    by_width: dict[int, list[list[tuple[str, bool | None]]]] = defaultdict(lambda: [[], []])
    for side, parts in enumerate((ours, theirs)):
        for key, part in parts.items():
            by_width[part.shape[1]][side].append(key)
    labels: tuple[_Parts, _Parts] = ({}, {})
    start = 0
    for width, keys in by_width.items():
        directions = [
            _project_and_normalise_rows([parts[key] for key in keys[side]], width)
            for side, parts in enumerate((ours, theirs))
        ]
        nearest = label_nearest_directions(*directions, start=start)
        start += len(directions[1]) + len(directions[0])
        for side, parts in enumerate((ours, theirs)):
            lengths = [len(parts[key]) for key in keys[side]]
            labels[side].update(zip(keys[side], nearest[side].split(lengths), strict=True))
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
        for block in part.split(_BLOCK):
            rows = block.to(torch.float64)
            largest = rows.abs().amax(1, keepdim=True)
            rows = rows / largest.where(largest > 0, 1.0)
            projected.append(rows if projection is None else rows @ projection)
    return torch.nn.functional.normalize(torch.cat(projected), dim=1)


def label_nearest_directions(
    ours: Tensor, theirs: Tensor, *, start: int = 0
) -> tuple[Tensor, Tensor]:
    """Return labels of directions; equal labels for those that are parallel.

    Args:
        ours: (rows, dimensions), of length 1 or 0.
        theirs: (right rows, dimensions), likewise.
        start: the first label.
    """
    nearest, apart = _find_nearest_rows(ours, theirs)
    known = apart < 1 - LEAST_COSINE
    noise = float(apart[known].quantile(0.9)) if bool(known.any()) else 0.0
    parallel = min(_WIDEST, max(_SAME, 4 * noise))
    first = torch.arange(len(theirs))
    for place in range(0, len(theirs), _BLOCK):
        block = theirs[place : place + _BLOCK]
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
    for place in range(0, len(ours) if len(theirs) else 0, _BLOCK):
        block = ours[place : place + _BLOCK]
        best = (block @ theirs.T).abs().max(1)
        nearest[place : place + len(block)] = best.indices
        apart[place : place + len(block)] = 1 - best.values
    return nearest, apart
