"""Another base of the rotary frequencies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant


class RotaryThetaCause(Cause):
    """The rotary frequencies have another base.

    Pair i of a head turns by position * theta ** (-2i / width). Theta is 10,000 in Llama 2 and
    500,000 in Llama 3. Code that finds no `rope_theta` often takes 10,000 silently; transformers 5
    moved it into `rope_parameters`.

    Wrong:
        Rotary(theta=getattr(config, "rope_theta", 10_000.0))

    Right:
        Rotary(theta=config.rope_parameters["rope_theta"])

    Repair:
        `Rotary(theta=...)` with the number of the config.

    Confused with:
        rotary exponent width: another exponent is another theta.
        rotary scaling kind: NTK scaling is another theta.
        rotary missing: at position 0 all agree.
    """

    name: ClassVar[str] = "rotary theta"
    symptom: ClassVar[str] = "Short prompts are fine and long ones degrade: wrong rope_theta"
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary")

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the family of all bases from 10 to 10 million."""
        rotary = evidence.model.settings.rotary
        if rotary is None:
            return
        right = rotary.theta

        def make(theta: float) -> Variant:
            model = evidence.model.with_rotary(theta=theta)
            return Variant(model, {"theta": theta}, f"Rotary(theta={right:g})")

        yield Family(make, tuple(10.0 ** (n / 4) for n in range(4, 32)), is_log=True)
