"""Only a share of the heads is rotated."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import ClassVar

from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.simulation.attention_model import ForcedStage
from headwise.diagnosis.simulation.gaps import WHOLE


class RotarySomeHeadsCause(Cause):
    """Only a share of the heads is rotated.

    Code that takes an index for a slice rotates head 0 alone.

    Wrong:
        q[:, 0] = rotate(q[:, 0])

    Right:
        q = rotate(q)

    Repair:
        Rotate every head.

    Confused with:
        rotary missing: with one head.
    """

    name: ClassVar[str] = "rotary on some heads only"
    symptom: ClassVar[str] = (
        "Some heads are right and the others ignore positions: RoPE on a part of the heads"
    )
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary")
    cost: ClassVar[float] = 0.3

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the model without a rotation of the heads that part."""
        if evidence.model.settings.rotary is None:
            return
        model, heads = evidence.model, {}
        for stage in self.stages:
            parted = sorted({head for _, _, head in evidence.parted_calls_and_heads(stage)})
            count = evidence.model.weights[f"w{stage[0]}"].shape[0]
            if len(parted) == count or WHOLE in parted:
                return
            heads[stage[0]] = tuple(head for head in range(count) if head not in parted)
            model = model.with_stage_function(stage, partial(_undo_rotation_of_heads, parted))
        rotated, details = {"rotated": heads["q"]}, {"rotated kv heads": heads["k"]}
        yield Variant(model, rotated, "rotate every head", details)


def _undo_rotation_of_heads(heads: list[int], forced: ForcedStage) -> Tensor:
    x, bare = forced.usual_result().clone(), forced[f"{forced.stage[0]} after norm"]
    x[:, heads] = bare[:, heads]
    return x
