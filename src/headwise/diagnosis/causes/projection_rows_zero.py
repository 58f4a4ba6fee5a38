"""Rows of zeros in a projection."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections_base import MovedProjectionsCause


class ProjectionRowsZeroCause(MovedProjectionsCause):
    """Rows of a projection were never loaded, and are zero.

    A loader that makes empty tensors and finds no name for them leaves zeros. Shards that were not
    read do the same for some heads.

    Repair:
        Load the tensors that are reported, and use `load_state_dict(..., strict=True)`.

    Confused with:
        bias missing: of biases alone.
        weights at their initial values: loaders that make usual initial values in place of zeros.
    """

    name: ClassVar[str] = "rows zero"
    symptom: ClassVar[str] = (
        "Some heads, or the whole attention output, are zero: weights that were never loaded"
    )
    cost: ClassVar[float] = 1.07
