"""Positions of queries and keys are off by a constant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.simulation.gaps import WHOLE, all_heads_agree_within_rounding

MOST = 64
OFFSETS = tuple(offset for offset in range(-MOST, MOST + 1) if offset)


class RotaryPositionOffsetCause(Cause):
    """Positions of queries and keys are off by a constant.

    Scores depend on the difference of two positions. A constant offset of both is therefore the
    same function. `compare` names it where q alone or k alone is off, or says "same function, other
    weights".

    Wrong:
        positions = torch.arange(1, length + 1)

    Right:
        positions = torch.arange(length)

    Repair:
        Start positions at the number of the original.

    Confused with:
        position offset in decoding: if the first call is right.
        rotary axis: with one token.
    """

    name: ClassVar[str] = "rotary position offset"
    symptom: ClassVar[str] = (
        "RoPE positions start at 1, or at the length of the padding, and q and k differ"
    )
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary")

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return offsets of up to MOST tokens of queries and of keys, not the same for both."""
        parted = [stage[0] for stage in self.stages if evidence.parted_calls_and_heads(stage)]
        if evidence.model.settings.rotary is None or _has_equal_offsets(evidence):
            return
        for role in parted or ("q", "k"):
            for offset in OFFSETS:
                model = evidence.model.with_rotary(**{f"{role}_offset": offset})
                repair = f"positions that are {abs(offset)} {'smaller' if offset > 0 else 'larger'}"
                yield Variant(model, {"role": role, "offset": offset}, repair)


def _has_equal_offsets(evidence: Evidence) -> bool:
    """True if queries and keys are off by the same number, which changes no score."""
    stages = ("q after rotary", "k after rotary")
    if not all(evidence.parted_calls_and_heads(stage) for stage in stages):
        return False
    call = min(evidence.calls, key=lambda call: call.inputs.x.shape[1])
    models = (evidence.model.with_rotary(q_offset=n, k_offset=n) for n in OFFSETS)
    return any(
        all(all_heads_agree_within_rounding(model, call, stage, [WHOLE]) for stage in stages)
        for model in models
    )
