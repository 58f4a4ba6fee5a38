"""All causes, in the order in which equal ones are named."""

from __future__ import annotations

from headwise.diagnosis.causes.cause import Cause
from headwise.diagnosis.causes.rotary_theta import RotaryThetaCause
from headwise.diagnosis.causes.scale import ScaleCause

CAUSES: tuple[Cause, ...] = (ScaleCause(), RotaryThetaCause())
