"""Other channels turn together: i with i + width / 2, or 2i with 2i + 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.simulation.settings import Pairing


class RotaryPairingCause(Cause):
    """Other channels turn together: i with i + width / 2, or 2i with 2i + 1.

    Hugging Face's Llama, GPT-NeoX and Qwen turn i with i + width / 2 (half-split, `rotate_half`).
    Meta's Llama, GPT-J, Cohere and GLM turn 2i with 2i + 1 (interleaved). The names and shapes of
    the weights are the same. Text is fluent and wrong.

    Wrong:
        a, b = x[..., : width // 2], x[..., width // 2 :]  # GPT-J

    Right:
        a, b = x[..., 0::2], x[..., 1::2]

    Repair:
        Set the pairing that is reported, or permute the rows once: `headwise convert MODEL OUT --to
        llama`.

    Confused with:
        rotary permutation missing: the same outputs, by rows of weights in place of code.
        rotary missing: at position 0 the three agree.
    """

    name: ClassVar[str] = "rotary pairing"
    symptom: ClassVar[str] = (
        "GPT-J or Meta weights give other outputs in a Hugging Face Llama: interleaved RoPE"
    )
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary")

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the other convention."""
        rotary = evidence.model.settings.rotary
        if rotary is None:
            return
        other: Pairing = "interleaved" if rotary.pairing == "half-split" else "half-split"
        model = evidence.model.with_rotary(pairing=other, span=None)
        yield Variant(model, {"pairing": other}, f'Rotary(pairing="{rotary.pairing}")')
