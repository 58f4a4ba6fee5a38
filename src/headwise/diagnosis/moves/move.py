"""A move: one named mistake that makes the rows of a from those of b."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from headwise.diagnosis.moves.heads import MatrixMap
from headwise.diagnosis.moves.maps import MapName, RowMap
from headwise.diagnosis.moves.rows import Rows, take_rows

BOTH = ("weights", "biases")


class Change(Protocol):
    """A change of rows."""

    def apply(self, rows: Rows) -> Rows:
        """Return changed rows."""


@dataclass(frozen=True)
class Taken:
    """A map of rows or matrices as a change.

    Attributes:
        parts: which of weights and biases move.
        still: roles whose biases stay.
    """

    step: RowMap | MatrixMap
    parts: tuple[str, ...] = BOTH
    still: tuple[str, ...] = ()

    def apply(self, rows: Rows) -> Rows:
        """Return the rows in their new places."""
        if isinstance(self.step, MatrixMap):
            return self.step.apply(rows)
        sizes = rows.head_counts_and_dims()
        moved = take_rows(rows, self.step.index_over_roles(sizes), sizes, self.parts)
        kept = {role: rows.biases[role] for role in self.still if role in rows.biases}
        return Rows(moved.matrices, {**moved.biases, **kept})


@dataclass(frozen=True)
class Move:
    """One named mistake.

    Attributes:
        name: the simplest name.
        equals: other names of the same effect at these sizes.
        change: the mistake as a change of rows.
        parts: which of weights and biases it concerns.
    """

    name: MapName
    change: Change
    equals: tuple[MapName, ...] = ()
    parts: tuple[str, ...] = BOTH

    @property
    def cause(self) -> str:
        """The name of the cause."""
        return self.name.cause

    @property
    def roles(self) -> tuple[str, ...]:
        """The projections that it concerns."""
        return self.name.roles

    @property
    def cause_parameters(self) -> dict[str, Any]:
        """The parameters by name, such as the number of heads that was used."""
        return dict(self.name.parameters)

    def apply(self, rows: Rows) -> Rows:
        """Return the rows that the mistake makes of right ones."""
        return self.change.apply(rows)

    def __str__(self) -> str:
        where = " and ".join(self.roles)
        parts = "" if self.parts == BOTH else f", {' and '.join(self.parts)} alone"
        return f"{self.name} ({where}{parts})"


@dataclass(frozen=True)
class MoveReport:
    """Moves that make the rows of a from those of b.

    Attributes:
        moves: in the order in which they are applied to b.
        others: other sequences of moves with the same effect.
        explained: roles that the moves make equal, or that were equal.
        unexplained: the other roles.
        residual: role -> the largest difference left, relative to the root mean square of the
            role; 0 where every bit is equal.
    """

    moves: tuple[Move, ...]
    others: tuple[tuple[Move, ...], ...] = ()
    explained: tuple[str, ...] = ()
    unexplained: tuple[str, ...] = ()
    residual: dict[str, float] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        """True if every role is explained to the last bit."""
        return not self.unexplained and not any(self.residual.values())

    def apply(self, rows: Rows) -> Rows:
        """Return the rows that the moves make of b's: a prediction of a."""
        for move in self.moves:
            rows = move.apply(rows)
        return rows

    def __str__(self) -> str:
        lines = [str(move) for move in self.moves] or ["no move"]
        if self.unexplained:
            lines.append(f"not explained: {', '.join(self.unexplained)}")
        return "; ".join(lines)
