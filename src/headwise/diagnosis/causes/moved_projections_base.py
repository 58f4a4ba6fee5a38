"""Base class of the causes that move rows of the projections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.causes.find_projection_moves import (
    apply_moves_to_model,
    find_projection_moves,
)
from headwise.diagnosis.moves.move import Move
from headwise.diagnosis.moves.row_map import MapName
from headwise.diagnosis.simulation.attention_model import AttentionModel


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

    def exchange_weights_of_roles(
        self, model: AttentionModel, first: str, second: str
    ) -> Iterator[Variant]:
        """Yield the model with the weights of two roles exchanged, if they have one shape.

        In cross attention the rows of queries are channels over other tokens than those of keys,
        so that they cannot be looked up among them.
        """
        weights = model.weights
        if weights[f"w{first}"].shape != weights[f"w{second}"].shape:
            return
        pairs = [(f"{kind}{first}", f"{kind}{second}") for kind in "wb"]
        changes = {a: weights.get(b) for a, b in pairs} | {b: weights.get(a) for a, b in pairs}
        where = f"w{first}, w{second}"
        yield Variant(
            model.with_weights(**changes),
            {"roles": first + second},
            f"undo it in {where}: {self.name}",
        )

    def _matching_name(self, move: Move) -> MapName | None:
        return next((each for each in (move.name, *move.equals) if each.cause == self.name), None)


def _cause_parameters(name: MapName) -> dict[str, object]:
    return {"roles": "".join(name.roles), **dict(name.parameters)}
