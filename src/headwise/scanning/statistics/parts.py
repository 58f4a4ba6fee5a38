"""The tensors of a summary: their shapes, their dtypes and the values that they can have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

HEADS = "heads"  # an axis with one entry for each head that was looked at


@dataclass(frozen=True, kw_only=True)
class Part:
    """One tensor of a summary.

    Attributes:
        axes: the axes after heads: a length, `HEADS`, or a name. Axes of one name have one length
            within a summary.
        values: "number" is any float64; "count" is a float64 that is a whole number from 0 on;
            "weight" is a float64 from 0 on, or −1 for none; "integer" is any int64.
    """

    axes: tuple[int | str, ...] = ()
    values: Literal["number", "count", "weight", "integer"] = "number"

    def fault(self, tensor: Tensor, *, lengths: dict[str, int]) -> str | None:
        """Return the first thing that no summary has; None where there is none.

        Args:
            tensor: the tensor that should be this part.
            lengths: the length of each named axis that is known; lengths that are new are added.
        """
        dtype = torch.int64 if self.values == "integer" else torch.float64
        if tensor.dtype != dtype:
            return f"has the dtype {tensor.dtype}, where {dtype} is needed"
        axes = (HEADS, *self.axes)
        if tensor.dim() == len(axes):
            for axis, length in zip(axes, tensor.shape, strict=True):
                if isinstance(axis, str):
                    lengths.setdefault(axis, length)
        needed = tuple(lengths.get(axis, -1) if isinstance(axis, str) else axis for axis in axes)
        if tensor.shape != needed:
            names = ", ".join(
                f"{axis} {length}" if isinstance(axis, str) and length >= 0 else str(axis)
                for axis, length in zip(axes, needed, strict=True)
            )
            return f"has the shape {tuple(tensor.shape)}, where ({names}) is needed"
        return self._fault_of_values(tensor)

    def _fault_of_values(self, tensor: Tensor) -> str | None:
        if self.values == "count" and not bool(
            (tensor.isfinite() & (tensor >= 0) & (tensor == tensor.floor())).all()
        ):
            return "holds a number that is no count: a count is a whole number from 0 on"
        # A model can give weights that are NaN, so NaN is no fault here.
        if self.values == "weight" and bool(((tensor < 0) & (tensor != -1)).any()):
            return "holds a negative weight"
        return None


Parts = Mapping[str, Part]
COUNT = Part(values="count")
MEAN: Parts = {"sum": Part(), "count": COUNT}  # of a mean for each head


def mean_over(*axes: int | str) -> Parts:
    """Return the parts of a mean for each head and each entry of these axes."""
    return {"sum": Part(axes=axes), "count": Part(axes=axes, values="count")}


def fault_of_summary(
    parts: Parts, summary: Mapping[str, Tensor], *, num_heads: int
) -> tuple[str, str] | None:
    """Return the name of the first wrong tensor and what is wrong with it; None where none is."""
    if odd := sorted({*parts} ^ {*summary}):
        return odd[0], "is not there" if odd[0] in parts else "belongs to no such statistic"
    lengths = {HEADS: num_heads}
    for name, part in parts.items():
        if (fault := part.fault(summary[name], lengths=lengths)) is not None:
            return name, fault
    return None
