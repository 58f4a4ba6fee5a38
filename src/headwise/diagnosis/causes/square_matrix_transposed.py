"""A square matrix that is transposed."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections_base import MovedProjectionsCause
from headwise.diagnosis.moves.row_map import MapName


class MatrixTransposedCause(MovedProjectionsCause):
    """A square projection is stored as its transpose.

    GPT-2's Conv1D, Flax and Keras store (in, out), `torch.nn.Linear` stores (out, in). A square
    matrix raises no error.

    Wrong:
        linear.weight.copy_(conv1d.weight)

    Right:
        linear.weight.copy_(conv1d.weight.T)

    Repair:
        Transpose the matrix that is reported, or name the layout of the file: `--from gpt2`.

    Confused with:
        output projection reshaped with exchanged axes: with one head.
    """

    name: ClassVar[str] = "square matrix transposed"
    symptom: ClassVar[str] = (
        "Weights of GPT-2's Conv1D load into Linear without an error, and c_proj is wrong"
    )
    cost: ClassVar[float] = 1.02

    def remedy(self, name: MapName) -> str:
        """See `Cause.remedy`."""
        return f"transpose {', '.join(f'w{role}' for role in name.roles)}: weight.mT"
