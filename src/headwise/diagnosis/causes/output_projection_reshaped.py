"""An output projection reshaped with its axes exchanged."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections_base import MovedProjectionsCause


class OutputReshapedCause(MovedProjectionsCause):
    """The output projection is reshaped from (out_dim, heads, value_dim), axes exchanged.

    Flax, Keras and MaxText store the output projection with an axis for heads. A reshape to a
    matrix must keep the order of the axes; a permutation needs a transpose.

    Wrong:
        wo.reshape(out_dim, heads * d)  # of (heads, d, out_dim)

    Right:
        wo.reshape(heads * d, out_dim).T

    Repair:
        Transpose before the reshape, or name the layout of the file: `--from flax`.

    Confused with:
        square matrix transposed: with one head.
    """

    name: ClassVar[str] = "output projection reshaped with exchanged axes"
    symptom: ClassVar[str] = (
        "Head outputs agree and the output does not: the output projection was reshaped wrongly"
    )
    cost: ClassVar[float] = 1.05
