"""Weights rounded to another dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.causes.find_projection_moves import STAGE_OF
from headwise.diagnosis.moves.moves_between_canonical_weights import extract_rows, replace_rows
from headwise.diagnosis.moves.row_changes import ROUNDED, Rounded, format_dtype
from headwise.diagnosis.moves.row_map import MapName


class RoundedWeightsCause(Cause):
    """The weights were stored in another dtype once.

    A cast to bfloat16 keeps 8 bits of each weight. A cast back to float32 does not bring the others
    back.

    Repair:
        Load the weights from the file in the wider dtype.

    Confused with:
        softmax dtype: in the outputs alone, of about the same size.
    """

    name: ClassVar[str] = "dtype's rounding of weights"
    symptom: ClassVar[str] = (
        "Outputs differ by some parts in a thousand everywhere: weights were saved in bfloat16"
    )
    stages: ClassVar[tuple[str, ...]] = ("q", "k", "v", "output")
    cost: ClassVar[float] = 1.0

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the models after a rounding of the projections that parted."""
        rows = extract_rows(evidence.model.weights)
        roles = tuple(
            role for role in rows.roles if evidence.parted_calls_and_heads(STAGE_OF[role])
        )
        for dtype in ROUNDED:
            for parts in (("weights", "biases"), ("weights",)):
                rounded = Rounded(roles, dtype, parts).apply(rows)
                weights = replace_rows(evidence.model.weights, rounded)
                if "bo" in weights and "biases" in parts and "o" in roles:
                    weights["bo"] = weights["bo"].to(dtype).to(weights["bo"].dtype)
                yield Variant(
                    evidence.model.with_weights(**weights),
                    {"roles": "".join(roles), "dtype": str(dtype)},
                    _wider_dtype_advice(format_dtype(dtype)),
                )

    def remedy(self, name: MapName) -> str:
        """See `Cause.remedy`."""
        return _wider_dtype_advice(name.text)


def _wider_dtype_advice(dtype: str) -> str:
    return f"load the weights in a wider dtype than {dtype}"
