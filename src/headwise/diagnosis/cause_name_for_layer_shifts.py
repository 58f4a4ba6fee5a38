"""Names for layers of a model that have the weights of other layers."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from headwise.diagnosis.causes.layers_exchanged import LayersExchangedCause
from headwise.diagnosis.causes.layers_off_by_one import LayersOffByOneCause

LOAD_BY_NUMBER = "load each layer by its number"


def cause_of_layer_shifts(shifts: AbstractSet[int]) -> str:
    """Return the cause of layers that moved by these numbers of places."""
    is_off_by_one = shifts in ({1}, {-1})
    return LayersOffByOneCause.name if is_off_by_one else LayersExchangedCause.name
