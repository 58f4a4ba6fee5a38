"""The frequencies are scaled by another formula, or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.simulation.settings import RotaryForm
from headwise.errors import OptionError
from headwise.layers.positions.rotary_scaling import (
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    Scaling,
    YarnScaling,
)

FACTORS = (2.0, 4.0, 8.0, 16.0, 32.0, 40.0)
LENGTHS = (32, 2048, 4096, 8192, 32768)


class RotaryScalingKindCause(Cause):
    """The frequencies are scaled by another formula, or not at all.

    Linear scaling divides all frequencies. NTK scaling changes theta. Llama 3 and YaRN divide low
    frequencies alone. Code that does not know a `rope_type` often ignores it.

    Wrong:
        Rotary(theta=500_000.0)

    Right:
        Rotary(theta=500_000.0, scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192))

    Repair:
        Take the scaling that is reported.

    Confused with:
        rotary theta: NTK scaling is another theta.
        rotary scaling factor: with a factor of 1, all kinds are equal.
    """

    name: ClassVar[str] = "rotary scaling kind"
    symptom: ClassVar[str] = (
        "Long prompts degrade although theta and factor are right: rope_scaling of another type"
    )
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary")
    cost: ClassVar[float] = 1.05

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return no scaling, and the other formulas with this factor or a usual one."""
        rotary = evidence.model.settings.rotary
        if rotary is None:
            return
        length = getattr(rotary.scaling, "original_length", None)
        factors = FACTORS if rotary.scaling is None else (rotary.scaling.factor, *FACTORS)
        for scaling in _list_other_scalings(
            rotary, factors, LENGTHS if length is None else (length,)
        ):
            for amplitude in (None, rotary.amplitude, 1.0):
                model = evidence.model.with_rotary(scaling=scaling, attention_factor=amplitude)
                kind = "none" if scaling is None else type(scaling).__name__
                details = {} if scaling is None else {"factor": scaling.factor}
                yield Variant(model, {"scaling": kind}, f"scaling={rotary.scaling}", details)


def _list_other_scalings(
    rotary: RotaryForm, factors: Sequence[float], lengths: Sequence[int]
) -> Iterator[Scaling | None]:
    """Return the scalings of other kinds that have frequencies for this rotation."""
    made: list[Scaling | None] = [None]
    for factor in factors:
        made += [LinearScaling(factor), NTKScaling(factor)]
        made += [Llama3Scaling(factor, 1.0, 4.0, length) for length in lengths]
        made += [YarnScaling(factor, length) for length in lengths]
    for scaling in made:
        if type(scaling) is not type(rotary.scaling):
            with suppress(OptionError):  # no pair of channels on the ramp
                replace(rotary, scaling=scaling).frequencies()
                yield scaling
