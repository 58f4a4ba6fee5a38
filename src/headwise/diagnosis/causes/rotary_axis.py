"""Angles grow with the head, the batch or the reversed position in place of the position."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.simulation.attention_model import ForcedStage


class RotaryAxisCause(Cause):
    """Angles grow with the head, the batch or the reversed position in place of the position.

    Rotary code takes the axis of length from the shape. After the transpose to (batch, heads,
    length, d) it is axis 2, and before it axis 1.

    Wrong:
        positions = torch.arange(q.shape[1])  # of (batch, heads, length, d)

    Right:
        positions = torch.arange(q.shape[2])

    Repair:
        Rotate by the position of the token.

    Confused with:
        rotary missing: with one head, or one sequence, the angles are all 0.
        rotary position offset: with one token.
    """

    name: ClassVar[str] = "rotary axis"
    symptom: ClassVar[str] = (
        "RoPE is right with one head and wrong with several: it rotates by the head's number"
    )
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary")

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return angles by head, by position and head, by batch, and by position from the end."""
        rotary = evidence.model.settings.rotary
        if rotary is None:
            return
        for axis in ("head", "position and head", "batch", "position from the end"):
            model = evidence.model
            for stage in self.stages:
                model = model.with_stage_function(stage, partial(_rotate_by_axis, axis))
            yield Variant(model, {"axis": axis}, "rotate by the position of the token: axis 2 of 4")


def _rotate_by_axis(axis: str, forced: ForcedStage) -> Tensor:
    role, rotary = forced.stage[0], forced.settings.rotary
    x = forced[f"{role} after norm"]
    if rotary is None:  # another cause removed the rotation
        return x
    positions = forced.call.query_positions if role == "q" else forced.call.new_key_positions
    places = _positions_along_axis(axis, x, positions[:, None])
    angles = places[..., None].double() * rotary.frequencies()
    return rotary.rotate_by_angles(x, angles, *rotary.pair_slices())


def _positions_along_axis(axis: str, x: Tensor, positions: Tensor) -> Tensor:
    heads = torch.arange(x.shape[1])[:, None]
    match axis:
        case "head":
            return heads
        case "position and head":
            return positions + heads
        case "batch":
            return torch.arange(len(x))[:, None, None]
        case _:
            return positions.flip(-1)
