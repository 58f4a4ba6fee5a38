"""Rotated rows permuted once too often."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections_base import MovedProjectionsCause


class RotaryPermutationDoubledCause(MovedProjectionsCause):
    """Rows are permuted to another pairing though they had it, or are values, which do not rotate.

    `convert_llama_weights_to_hf` and llama.cpp's `permute` expect rows of one pairing. Files of
    both pairings have the same names in torchtune and in Hugging Face. Rows of values stay in
    their places in every conversion.

    Repair:
        Convert the original file once, with the layout that it has: `--from llama-meta` for Meta's.

    Confused with:
        rotary permutation missing: with four channels a head, the permutation is its own inverse.
        rotary permutation with a wrong number of heads: for some numbers of heads.
    """

    name: ClassVar[str] = "rotary permutation doubled"
    symptom: ClassVar[str] = (
        "A Llama checkpoint that was already converted gives gibberish after a second conversion"
    )
    cost: ClassVar[float] = 1.01
