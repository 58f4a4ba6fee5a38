"""Calls with earlier keys count their positions from another number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import ClassVar

from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.causes.change_later_calls import (
    change_call_positions,
    change_model_in_later_calls,
    has_later_calls,
)
from headwise.diagnosis.simulation.attention_model import ForcedStage
from headwise.diagnosis.simulation.stages import RecordedCall

MOST = 16


class DecodingPositionOffsetCause(Cause):
    """Calls with earlier keys count their positions from another number.

    A call of 1 token after n earlier ones is at position n. Code that makes positions of the length
    of the call rotates it as if it were at position 0. Later keys are then stored at wrong
    positions as well.

    Wrong:
        positions = torch.arange(tokens)

    Right:
        positions = torch.arange(tokens) + past_length

    Repair:
        Continue the positions from the keys in the cache, without counting padding.

    Confused with:
        rotary position offset: if the first call is off by the same number.
        left padding in decoding: both part in later calls alone; the second of them needs padding.
    """

    name: ClassVar[str] = "position offset in decoding"
    symptom: ClassVar[str] = (
        "Prefill is right, and every token generated with a key/value cache is wrong"
    )
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary", "scores")
    cost: ClassVar[float] = 0.7

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return offsets in calls with earlier keys, and positions that start at 0 again."""
        if not has_later_calls(evidence):
            return
        offsets: list[int | None] = [None, *(n for n in range(-MOST, MOST + 1) if n)]
        for offset in offsets:
            model = change_model_in_later_calls(
                evidence, self.stages, partial(_shift_positions, offset)
            )
            words = "from 0 again" if offset is None else offset
            yield Variant(model, {"offset": words}, "positions continue from the keys in the cache")


def _shift_positions(offset: int | None, forced: ForcedStage) -> ForcedStage:
    def positions(call: RecordedCall) -> Tensor:
        return call.query_positions + (-call.past_key_count if offset is None else offset)

    return replace(forced, call=change_call_positions(forced.call, positions))
