"""Rotated rows in the order of the other pairing."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections_base import MovedProjectionsCause


class RotaryPermutationMissingCause(MovedProjectionsCause):
    """Rows of queries or keys keep the order of the pairing that they were stored for.

    Meta's weights are for interleaved pairs, those of Hugging Face for half-split ones. The
    conversion permutes the rows of wq and wk in every head.

    Wrong:
        state["q_proj.weight"] = meta["wq.weight"]

    Right:
        rows = meta["wq.weight"].reshape(heads, d // 2, 2, width)
        state["q_proj.weight"] = rows.transpose(1, 2).reshape(heads * d, width)

    Repair:
        `headwise convert MODEL OUT --from llama-meta --to llama`.

    Confused with:
        rotary pairing: the same outputs, by the code of the rotation in place of the rows.
        rotary permutation doubled: with four channels a head, the permutation is its own inverse.
    """

    name: ClassVar[str] = "rotary permutation missing"
    symptom: ClassVar[str] = (
        "A Llama checkpoint of Meta gives gibberish in Hugging Face: q and k rows are not permuted"
    )
    cost: ClassVar[float] = 1.01
