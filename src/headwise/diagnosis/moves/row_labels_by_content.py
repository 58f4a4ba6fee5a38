"""Labels of two sets of rows, as they are and with matrices transposed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor

from headwise.diagnosis.moves.matrix_map import MatrixMap, transpose_into_same_shape
from headwise.diagnosis.moves.row_hashes import hash_columns, hash_rows
from headwise.diagnosis.moves.rows_of_all_projections import Rows, RowSizes


@dataclass
class Labelled:
    """Labels of the rows of each role, and of the rows of its matrix read with exchanged axes.

    Attributes:
        sizes: of the rows.
        plain: (rows of all roles), int64.
        matrix_maps: the maps of matrices that can be asked about.
        by_map: role, and whether the map is reversed -> the labels of the role after it.
    """

    sizes: RowSizes
    plain: Tensor
    by_map: Mapping[tuple[str, bool], Tensor] = field(default_factory=dict)

    def labels_after_map(self, matrix_map: MatrixMap, *, undone: bool = False) -> Tensor:
        """Return the labels of all rows after a map of matrices, or before it.

        Returns:
            (rows of all roles), int64.
        """
        labels, spans = self.plain.clone(), self.sizes.spans()
        for role in matrix_map.roles:
            labels[spans[role]] = self.by_map[role, matrix_map.is_reversed != undone]
        return labels


def label_rows_by_bits(
    rows: Rows, sizes: RowSizes, *, matrices: bool, given: Rows | None = None
) -> Labelled:
    """Return labels of the bits of the weights.

    Args:
        rows: the projections.
        sizes: of them.
        matrices: True to label matrices that are read with exchanged axes as well.
        given: the rows with matrices transposed, if they cannot be computed.
    """
    plain = torch.cat([hash_rows(rows.matrix_of_role(role)) for role in sizes.roles])
    by_map = {}
    if given is not None:
        by_map = {(role, False): hash_rows(given.matrix_of_role(role)) for role in given.roles}
        return Labelled(sizes, plain, by_map)
    for role in sizes.roles if matrices else ():
        matrix = rows.matrix_of_role(role)
        for is_reversed in (False, True):
            if matrix.shape[0] == matrix.shape[1]:
                by_map[role, is_reversed] = hash_columns(matrix)
            else:
                by_map[role, is_reversed] = hash_rows(
                    transpose_into_same_shape(matrix, is_reversed=is_reversed)
                )
    return Labelled(sizes, plain, by_map)


def list_matrix_maps(rows: Rows, sizes: RowSizes, given: Rows | None = None) -> list[MatrixMap]:
    """Return the maps of matrices for these rows, those of the fewest roles first.

    Args:
        rows: the projections.
        sizes: of them.
        given: the rows with matrices transposed, if they cannot be computed.
    """
    square = [
        r for r in sizes.roles if rows.matrix_of_role(r).shape[0] == rows.matrix_of_role(r).shape[1]
    ]
    if given is not None:
        square = [role for role in sizes.roles if role in given.roles]
    maps = [
        MatrixMap(roles, is_square=True, given=given)
        for count in range(1, len(square) + 1)
        for roles in combinations(square, count)
    ]
    for role in sizes.roles if given is None else ():
        if role not in square and min(rows.matrix_of_role(role).shape) > 1:
            maps += [MatrixMap((role,), is_square=False, is_reversed=x) for x in (False, True)]
    return maps
