"""Keys and values in each other's place."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections_base import MovedProjectionsCause


class KAndVExchangedCause(MovedProjectionsCause):
    """The keys have the rows of the values, and the values those of the keys.

    Files that name k before v, or fuse [q, v, k], have been read in the usual order. CodeGen stores
    q, v, k.

    Wrong:
        q, k, v = fused.chunk(3)  # of rows stored as [q|v|k]

    Right:
        q, v, k = fused.chunk(3)

    Repair:
        Exchange wk and wv, with their biases.

    Confused with:
        order of fused rows: if the file fuses the three.
    """

    name: ClassVar[str] = "k and v exchanged"
    symptom: ClassVar[str] = (
        "Ported weights load without an error, and every output is wrong: keys and values swapped"
    )
    stages: ClassVar[tuple[str, ...]] = ("k", "v")
    cost: ClassVar[float] = 1.0
