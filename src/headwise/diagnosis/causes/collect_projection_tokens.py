"""Inputs and outputs of a projection, one row for each token of all calls."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from headwise.diagnosis.causes.cause import Evidence
from headwise.diagnosis.causes.find_projection_moves import STAGE_OF


def collect_projection_tokens(evidence: Evidence, role: str) -> tuple[Tensor, Tensor] | None:
    """Return the inputs (tokens, columns) and the recorded stage (tokens, rows) of a projection."""
    needed = {"head outputs", "output"} if role == "o" else {role}
    calls = [call for call in evidence.calls if needed <= set(call.stages)]
    if not calls:
        return None
    recorded = flatten_tokens(call.stages[STAGE_OF[role]] for call in calls)
    if role == "o":
        return flatten_tokens(call.stages["head outputs"] for call in calls), recorded
    inputs = (call.inputs.x if role == "q" else call.inputs.key_source for call in calls)
    return flatten_tokens(inputs), recorded


def flatten_tokens(stages: Iterable[Tensor]) -> Tensor:
    """Return (tokens, channels) of stages that may have an axis of heads."""
    rows = (x.transpose(1, 2).flatten(2) if x.dim() == 4 else x for x in stages)
    return torch.cat([x.flatten(0, 1).double() for x in rows])
