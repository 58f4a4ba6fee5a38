"""The repair of a move of stored weights, in the words of its cause."""

from __future__ import annotations

from headwise.diagnosis.attention_comparison_result import cause_page_path
from headwise.diagnosis.causes.all_causes import CAUSES
from headwise.diagnosis.causes.cause import describe_undoing
from headwise.diagnosis.causes.missing_biases import MissingBiasesCause
from headwise.diagnosis.moves.move import Move

# Biases that are zero are described with those that are missing.
_CAUSES_OF_MOVES = {cause.name: cause for cause in CAUSES} | {"bias zero": MissingBiasesCause()}


def describe_repair(move: Move) -> str:
    """Return what makes the moved weights right again."""
    cause = _CAUSES_OF_MOVES.get(move.cause)
    return describe_undoing(move.name) if cause is None else cause.remedy(move.name)


def page_of_cause(name: str) -> str:
    """Return the path of the page about a cause; "" for a move that has none."""
    cause = _CAUSES_OF_MOVES.get(name)
    return "" if cause is None else cause_page_path(cause.name)
