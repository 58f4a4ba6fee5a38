"""Model of a layer that runs otherwise than its weights and settings state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headwise.diagnosis.catalogue import CAUSES
from headwise.diagnosis.causes.evidence import Evidence
from headwise.diagnosis.search import search_causes
from headwise.diagnosis.simulation.model import AttentionModel
from headwise.diagnosis.simulation.stages import RecordedCall


def build_attention_model_as_run(
    model: AttentionModel, calls: Sequence[RecordedCall]
) -> AttentionModel | None:
    """Return the model that predicts a layer's own calls, such as with hooks of its modules.

    It is None where no cause explains the calls.
    """
    evidence = Evidence.of(model, calls)
    named = search_causes(evidence, CAUSES)
    if named.left.cells_beyond_rounding:
        return None
    if not named.causes:
        return model
    return replace(named.causes[-1].model, of_weights=model)
