"""The weights of a projection are used without a call of its module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.causes.find_projection_moves import STAGE_OF
from headwise.diagnosis.simulation.gaps import replace_model_stage_in_heads


class ProjectionModuleBypassedCause(Cause):
    """The weights of a projection are used without a call of its module.

    A module may do more than multiply by its weights: hooks scale its output, and wrappers of
    adapters or of quantised weights add to it. Code that reads `q_proj.weight` skips this.

    Wrong:
        q = F.linear(x, layer.q_proj.weight)

    Right:
        q = layer.q_proj(x)

    Repair:
        Call the module of the projection.

    Confused with:
        factor: if a hook multiplies the output, the weights may as well be divided.
        scale: likewise, for queries or keys without a norm.
    """

    name: ClassVar[str] = "projection never called"
    symptom: ClassVar[str] = "Hooks of a projection never run, and the layer ignores an adapter"
    stages: ClassVar[tuple[str, ...]] = ("q", "k", "v", "output")
    cost: ClassVar[float] = 0.5

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the projections of the stored weights, all that part and each."""
        of_weights = evidence.model.of_weights
        if of_weights is None:
            return
        parted = tuple(
            role for role, stage in STAGE_OF.items() if evidence.parted_calls_and_heads(stage)
        )
        for roles in dict.fromkeys((parted, *((role,) for role in parted))):
            model = evidence.model
            for role in roles:
                model = replace_model_stage_in_heads(model, of_weights, STAGE_OF[role], None)
            names = "".join(roles)
            yield Variant(model, {"roles": names}, f"call the modules of {', '.join(roles)}")
