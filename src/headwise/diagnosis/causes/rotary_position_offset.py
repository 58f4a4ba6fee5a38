"""Positions of queries and keys are off by a constant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant

MOST = 64


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
        """Return offsets up to MOST tokens."""
        if evidence.model.settings.rotary is None:
            return
        for offset in range(-MOST, MOST + 1):
            if offset:
                model = evidence.model.with_rotary(q_offset=offset, k_offset=offset)
                repair = f"positions that are {abs(offset)} {'smaller' if offset > 0 else 'larger'}"
                yield Variant(model, {"offset": offset}, repair)
