"""The repair of a move of stored weights, in the words of its cause."""

from __future__ import annotations

from headwise.diagnosis.attention_comparison_result import cause_page_path
from headwise.diagnosis.causes.all_causes import CAUSES
from headwise.diagnosis.causes.missing_biases import MissingBiasesCause
from headwise.diagnosis.causes.moved_projections_base import (
    MovedProjectionsCause,
    describe_undoing,
)
from headwise.diagnosis.causes.rounded_weights import RoundedWeightsCause
from headwise.diagnosis.causes.weights_at_initial_values import InitialWeightsCause
from headwise.diagnosis.moves.move import Move

_CAUSES_BY_NAME = {cause.name: cause for cause in CAUSES}


def describe_repair(move: Move) -> str:
    """Return what makes the moved weights right again."""
    cause = _CAUSES_BY_NAME.get(move.cause)
    if isinstance(cause, MovedProjectionsCause):
        return cause.remedy(move.name)
    if move.cause in (MissingBiasesCause.name, "bias zero"):
        return f"load the biases {', '.join(f'b{role}' for role in move.roles)}"
    if isinstance(cause, InitialWeightsCause):
        return f"load {', '.join(f'w{role}' for role in move.roles)}: not loaded, but initialised"
    if isinstance(cause, RoundedWeightsCause):
        return f"load the weights in a wider dtype than {move.name.text}"
    return describe_undoing(move.name)


def page_of_cause(name: str) -> str:
    """Return the page of the documentation about a cause; "" for a move that has none."""
    return cause_page_path(name) if name in _CAUSES_BY_NAME else ""
