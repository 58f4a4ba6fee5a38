"""Biases that are missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.causes.find_projection_moves import STAGE_OF
from headwise.diagnosis.moves.row_map import MapName


class MissingBiasesCause(Cause):
    """Projections lack their biases, or the biases are zero.

    Qwen2 and GLM have biases in q, k and v, and none in the output projection. Whisper has none in
    k. A loader that ignores unexpected names drops them silently. A bias of k cancels in the
    softmax if keys are neither rotated nor normalised: the two are then the same function.

    Repair:
        Load the biases that are reported, and use `load_state_dict(..., strict=True)`.

    Confused with:
        rows zero: if the weights are missing as well.
    """

    name: ClassVar[str] = "bias missing"
    symptom: ClassVar[str] = (
        "Outputs are off by a constant: biases of the checkpoint (Qwen2, GPT-2) were not loaded"
    )
    stages: ClassVar[tuple[str, ...]] = ("q", "k", "v", "output")
    cost: ClassVar[float] = 1.0

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the models without the biases of the stages that parted, all and each."""
        parted = {
            f"b{role}": stage
            for role, stage in STAGE_OF.items()
            if evidence.parted_calls_and_heads(stage) and f"b{role}" in evidence.model.weights
        }
        for names in dict.fromkeys((tuple(parted), *((name,) for name in parted))):
            if names:
                model = evidence.model.with_weights(**dict.fromkeys(names))
                roles = "".join(name[1:] for name in names)
                yield Variant(model, {"roles": roles}, _bias_loading_advice(roles))

    def remedy(self, name: MapName) -> str:
        """See `Cause.remedy`."""
        return _bias_loading_advice(name.roles)


def _bias_loading_advice(roles: Iterable[str]) -> str:
    return f"load the biases {', '.join(f'b{role}' for role in roles)}"
