"""Maps of whole matrices: transposed, or read as a matrix of the transposed shape."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headwise.diagnosis.moves.row_map import MapName
from headwise.diagnosis.moves.rows_of_all_projections import Rows

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
            return (MapName("square matrix transposed", "", self.roles, order),)
        text = "cut, then transposed" if self.is_reversed else "transposed, then cut"
        cause = "output projection reshaped with exchanged axes"
        if self.roles != ("o",):
            cause = "projection reshaped with exchanged axes"
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
