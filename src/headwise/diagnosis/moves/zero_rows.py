"""Rows of zeros where the right rows have numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.diagnosis.moves.move import BOTH, Move
from headwise.diagnosis.moves.row_changes import largest_residual
from headwise.diagnosis.moves.row_map import MapName
from headwise.diagnosis.moves.rows_of_all_projections import Rows


@dataclass(frozen=True, eq=False)
class Zeroed:
    """Some rows are zero.

    Attributes:
        role: the projection.
        rows: (heads, channels), bool: True for a row of zeros.
        parts: which of weights and biases are zero.
        still: roles whose biases are not.
    """

    role: str
    rows: Tensor
    parts: tuple[str, ...] = BOTH
    still: tuple[str, ...] = ()

    def apply(self, rows: Rows) -> Rows:
        """Return rows with zeros at these places."""
        weights = rows.matrices[self.role]
        zeroed = torch.where(self.rows[..., None], torch.zeros_like(weights), weights)
        biases = dict(rows.biases)
        if self.role in biases and self.role not in self.still and "biases" in self.parts:
            biases[self.role] = biases[self.role].masked_fill(self.rows, 0.0)
        return Rows({**rows.matrices, self.role: zeroed}, biases)


def find_zeroed_rows(role: str, a: Tensor, b: Tensor, tolerance: float) -> Move | None:
    """Return the move that leaves some rows of b without numbers, or None.

    Args:
        role: the projection.
        a: (heads, channels, columns).
        b: likewise.
        tolerance: relative, for the rows that are not zero.
    """
    zeros = ~a.any(2) & b.any(2)
    if not bool(zeros.any()):
        return None
    change = Zeroed(role, zeros)
    if largest_residual(a, change.apply(Rows({role: b})).matrices[role]) > tolerance:
        return None
    heads = tuple(zeros.all(1).nonzero().flatten().tolist())
    if bool(zeros.all()):
        text = "all"
    elif int(zeros.sum()) == len(heads) * zeros.shape[1]:
        text = f"heads {', '.join(map(str, heads))}"
    else:
        text = f"{int(zeros.sum())} of {zeros.numel()} rows"
    rows = tuple(zeros.flatten().nonzero().flatten().tolist())
    parameters = (("heads", heads), ("rows", rows))
    return Move(MapName("rows zero", text, (role,), 0, parameters), change)
