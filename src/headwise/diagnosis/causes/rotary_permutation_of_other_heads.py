"""Rotated rows permuted for another number of heads."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections_base import MovedProjectionsCause


class RotaryPermutationHeadsCause(MovedProjectionsCause):
    """Rows of queries or keys are permuted as if there were another number of heads.

    The permutation of the rotation is done in every head. Keys have kv_heads heads, fewer than
    queries.

    Wrong:
        permute(wk, heads)

    Right:
        permute(wk, kv_heads)

    Repair:
        Permute wk with the number of kv heads.

    Confused with:
        rotary permutation missing: for some sizes.
        heads interleaved: with two heads, a permutation made for one.
    """

    name: ClassVar[str] = "rotary permutation with a wrong number of heads"
    symptom: ClassVar[str] = (
        "A Llama with grouped queries gives gibberish after a conversion: k permuted for all heads"
    )
    cost: ClassVar[float] = 1.02
