"""The frequencies are scaled by another factor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant


class RotaryScalingFactorCause(Cause):
    """The frequencies are scaled by another factor.

    `rope_scaling` of the config has a factor, such as 8 for Llama 3.1. Some engines apply it twice,
    or read it from another key.

    Repair:
        Set the `factor` of the config.

    Confused with:
        rotary scaling kind: if all frequencies that matter are scaled alike.
        rotary theta: NTK scaling is another theta.
    """

    name: ClassVar[str] = "rotary scaling factor"
    symptom: ClassVar[str] = "Long prompts degrade, short ones are right: wrong rope_scaling factor"
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary")
    cost: ClassVar[float] = 1.06  # a factor of 1 is no scaling: another kind

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return factors, with the attention factor that follows and with the right one."""
        rotary = evidence.model.settings.rotary
        if rotary is None or rotary.scaling is None:
            return
        scaling = rotary.scaling
        for amplitude in (None, rotary.amplitude):

            def make(factor: float, amplitude: float | None = amplitude) -> Variant:
                changed = replace(scaling, factor=factor)
                model = evidence.model.with_rotary(scaling=changed, attention_factor=amplitude)
                return Variant(model, {"factor": factor}, f"scaling={scaling}")

            yield Family(make, tuple(1.25 * 1.6**n for n in range(9)), is_log=True)
