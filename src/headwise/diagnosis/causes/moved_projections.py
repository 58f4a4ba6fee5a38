"""Base class of the causes that move rows of the projections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.causes.projection_moves import apply_moves_to_model, find_projection_moves
from headwise.diagnosis.moves.move import Move
from headwise.diagnosis.moves.row_map import MapName


class MovedProjectionsCause(Cause):
    """Rows of the projections are in the wrong places, or changed all alike."""

    stages: ClassVar[tuple[str, ...]] = ("q", "k", "v", "output")

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the moves of rows that have this name.

        The rows of q, k and v are their channels over all tokens. Each is looked up among the rows
        of the other layer. Moves of the output projection are tried on recorded head outputs.
        """
        for moves in find_projection_moves(evidence):
            # Moves of separate roles are causes of their own.
            for place, move in enumerate(moves):
                name = self._matching_name(move)
                if name is not None:
                    later = {role for after in moves[place + 1 :] for role in after.roles}
                    yield Variant(
                        apply_moves_to_model(evidence.model, (move,)),
                        _cause_parameters(name),
                        self.remedy(name),
                        is_step=not later.isdisjoint(move.roles),
                    )

    def _matching_name(self, move: Move) -> MapName | None:
        return next((each for each in (move.name, *move.equals) if each.cause == self.name), None)

    def remedy(self, name: MapName) -> str:
        """Return what makes the layer in doubt equal again."""
        where = ", ".join(f"w{role}" for role in name.roles)
        return f"undo it in {where}: {name}"


def _cause_parameters(name: MapName) -> dict[str, object]:
    return {"roles": "".join(name.roles), **dict(name.parameters)}
