"""Tokens of (batch, tokens, width) are read as (tokens, batch, width)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.simulation.attention_model import BEFORE, ForcedStage


class BatchSequenceExchangedCause(Cause):
    """Tokens of (batch, tokens, width) are read as (tokens, batch, width).

    Token i of a sequence attends to token i of the other sequences. Every shape fits, and one
    sequence alone gets weights of 1.

    Wrong:
        nn.MultiheadAttention(width, heads)(x, x, x)

    Right:
        nn.MultiheadAttention(width, heads, batch_first=True)(x, x, x)

    Repair:
        Pass `batch_first=True`, or transpose the first two axes before and after the layer.

    Confused with:
        rotary axis: if only the rotation counts along the batch.
        softmax axis: if the scores are right and the softmax is over the batch.
    """

    name: ClassVar[str] = "batch and sequence exchanged"
    symptom: ClassVar[str] = (
        "Outputs depend on the other sequences of the batch; one sequence alone ignores its tokens"
    )
    stages: ClassVar[tuple[str, ...]] = (
        "q after rotary",
        "k after rotary",
        "scores",
        "head outputs",
    )
    cost: ClassVar[float] = 0.9

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return attention along the batch, with positions of the tokens or of the batch."""
        calls = evidence.calls
        if any(call.earlier or call.inputs.source is not None for call in calls):
            return
        for by_batch in (("scores",), (), ("q after rotary", "k after rotary", "scores")):
            model = evidence.model.with_stage_function("head outputs", _head_outputs_along_batch)
            for stage in self.stages[:3]:
                if stage == "scores":
                    model = model.with_stage_function(
                        stage, partial(_scores_along_batch, stage in by_batch)
                    )
                elif stage in by_batch:
                    model = model.with_stage_function(stage, _rotate_along_batch)
            yield Variant(model, {}, "batch_first=True, or x.transpose(0, 1) on both sides")


def _scores_along_batch(by_batch: bool, forced: ForcedStage) -> Tensor:
    """Return scores (tokens, heads, batch, batch)."""
    return _exchange_batch_and_sequence(
        forced, _positions_in_batch(forced).T if by_batch else None
    ).usual_result()


def _head_outputs_along_batch(forced: ForcedStage) -> Tensor:
    """Return head outputs of weights (tokens, heads, batch, batch)."""
    if len(forced["weights"]) != forced.call.inputs.x.shape[1]:
        return forced.usual_result()
    return _exchange_batch_and_sequence(forced, None).usual_result().transpose(0, 2)


def _rotate_along_batch(forced: ForcedStage) -> Tensor:
    """Return queries or keys rotated by their place in the batch."""
    inputs = replace(forced.call.inputs, positions=_positions_in_batch(forced))
    return replace(forced, call=replace(forced.call, inputs=inputs)).usual_result()


def _positions_in_batch(forced: ForcedStage) -> Tensor:
    """Return the place in the batch as a position, (batch, tokens)."""
    batch, tokens = forced.call.inputs.x.shape[:2]
    return torch.arange(batch)[:, None].expand(batch, tokens)


def _exchange_batch_and_sequence(forced: ForcedStage, positions: Tensor | None) -> ForcedStage:
    """Return the stage with what it is made of along the batch; the caller's mask does not fit."""
    call = forced.call
    before = [*BEFORE[forced.stage]]
    stages = {
        name: forced[name] if name == "weights" else forced[name].transpose(0, 2) for name in before
    }
    inputs = replace(
        call.inputs,
        x=call.inputs.x.transpose(0, 1),
        mask=None,
        positions=call.query_positions.T if positions is None else positions,
    )
    return replace(forced, call=replace(call, inputs=inputs, stages=stages))
