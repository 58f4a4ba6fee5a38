"""Queries and values in each other's place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Evidence, Family, Variant
from headwise.diagnosis.causes.moved_projections_base import MovedProjectionsCause


class QAndVExchangedCause(MovedProjectionsCause):
    """The queries have the rows of the values, and the values those of the queries.

    Files that name the projections in the order of the alphabet (k, out, q, v) have no order of
    use. Read tensors by name.

    Repair:
        Exchange wq and wv, with their biases.

    Confused with:
        order of fused rows: if the file fuses the three.
    """

    name: ClassVar[str] = "q and v exchanged"
    symptom: ClassVar[str] = (
        "Ported weights load, and only the keys agree: queries and values swapped"
    )
    stages: ClassVar[tuple[str, ...]] = ("q", "v")
    cost: ClassVar[float] = 1.0

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the moves of rows with this name; in cross attention, the exchanged weights."""
        yield from super().variants(evidence)
        if any(call.inputs.source is not None for call in evidence.calls):
            yield from self.exchange_weights_of_roles(evidence.model, "q", "v")
