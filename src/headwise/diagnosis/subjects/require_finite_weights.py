"""Refusal of layers whose weights hold no numbers: NaN, infinity, or the meta device."""

from __future__ import annotations

from torch import Tensor

from headwise.diagnosis.subjects.subject import Subject
from headwise.errors import OptionError
from headwise.layouts.canonical_tensor_equality import PARTS


def require_finite_weights(name: str, subject: Subject) -> None:
    """Check the weights of a side of a comparison, where they are known.

    Raises:
        OptionError: weights that are NaN or infinite, or that are on the meta device.
    """
    weights = {} if subject.model is None else subject.model.weights
    if meta := [PARTS.get(key, key) for key, weight in weights.items() if weight.is_meta]:
        raise OptionError(
            saw=f"{name} on the meta device, where {', '.join(meta)} have no numbers",
            needed="weights with numbers",
            do="load the weights into the layer, on a real device",
        )
    for key, weight in weights.items():
        if bad := _count_non_finite(weight):
            raise OptionError(
                saw=f"{name} with {bad} of {weight.numel()} entries of its {PARTS.get(key, key)} "
                "that are NaN or infinite",
                needed="finite weights: every output would be NaN, whatever the attention does",
                do="load the weights again, or look for an overflow of float16",
            )


def _count_non_finite(weight: Tensor) -> int:
    return weight.numel() - int(weight.isfinite().sum())
