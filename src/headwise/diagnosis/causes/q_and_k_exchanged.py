"""Queries and keys in each other's place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Evidence, Family, Variant
from headwise.diagnosis.causes.moved_projections_base import MovedProjectionsCause


class QAndKExchangedCause(MovedProjectionsCause):
    """The queries have the rows of the keys, and the keys those of the queries.

    The scores are k @ q.T in place of q @ k.T. Each token attends to those that should attend to
    it.

    Repair:
        Exchange wq and wk, with their biases.

    Confused with:
        order of fused rows: if the file fuses the three.
        rotary axis: with positions from the end, scores are transposed as well.
    """

    name: ClassVar[str] = "q and k exchanged"
    symptom: ClassVar[str] = "The attention map looks transposed: queries and keys are swapped"
    stages: ClassVar[tuple[str, ...]] = ("q", "k")
    cost: ClassVar[float] = 1.0

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the moves of rows with this name; in cross attention, the exchanged weights."""
        yield from super().variants(evidence)
        if any(call.inputs.source is not None for call in evidence.calls):
            yield from self.exchange_weights_of_roles(evidence.model, "q", "k")
