"""Queries and keys are not rotated, or are rotated where they should not be."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.simulation.attention_model import AttentionModel
from headwise.diagnosis.simulation.settings import Pairing, RotaryForm

PAIRINGS: tuple[Pairing, ...] = ("half-split", "interleaved")
THETAS = (1e3, 1e4, 1e5, 1e6)  # from which the fit of a base starts


class RotaryMissingCause(Cause):
    """Queries and keys are not rotated, or are rotated where they should not be.

    At position 0 the angles are 0, so the first token cannot show it.

    Repair:
        Rotate q and k before the scores: `rotary=Rotary(...)`. Keep the rotated keys in the cache,
        not the others.

    Confused with:
        rotary theta: a very large theta turns only the first channels.
        rotary axis: with one head, rotation by the head's number is none.
    """

    name: ClassVar[str] = "rotary missing"
    symptom: ClassVar[str] = (
        "The first token is right and all others are wrong: RoPE is not applied"
    )
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary")
    cost: ClassVar[float] = 0.9

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the model without its rotation; where it has none, rotations of all bases."""
        if evidence.model.settings.rotary is not None:
            model = evidence.model.with_settings(rotary=None)
            yield Variant(model, {}, "rotate q and k: Rotary(...)")
            return
        for pairing in PAIRINGS:
            yield Family(partial(_add_rotation, evidence.model, pairing), THETAS, is_log=True)


def _add_rotation(model: AttentionModel, pairing: Pairing, theta: float) -> Variant:
    """Return the model with a rotation of all channels."""
    width = model.weights["wq"].shape[1] // 2 * 2
    rotary = RotaryForm(theta, width, pairing)
    parameters = {"rotary": pairing, "theta": theta}
    return Variant(model.with_settings(rotary=rotary), parameters, "leave out the rotation")
