"""Head outputs (batch, heads, length, d) are viewed as (batch, length, heads * d)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.simulation.attention_model import ForcedStage


class MergeWithoutTransposeCause(Cause):
    """Head outputs (batch, heads, length, d) are viewed as (batch, length, heads * d).

    The view keeps the order of memory: head 0 of all tokens first. Training adapts to it, so a copy
    task still trains. A checkpoint of a right layer gives gibberish. With one head, or one token,
    the two are equal.

    Wrong:
        outputs.reshape(batch, length, heads * d)

    Right:
        outputs.transpose(1, 2).reshape(batch, length, heads * d)

    Repair:
        Transpose heads and length before the reshape.

    Confused with:
        split without transpose: if both are wrong, tokens are mixed before and after attention.
    """

    name: ClassVar[str] = "merge without transpose"
    symptom: ClassVar[str] = (
        "Outputs mix tokens: heads were joined by view or reshape without a transpose"
    )
    stages: ClassVar[tuple[str, ...]] = ("output",)

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the output projection of the view."""
        model = evidence.model.with_stage_function("output", _project_unmerged_heads)
        yield Variant(model, {}, "outputs.transpose(1, 2).flatten(2)")


def _project_unmerged_heads(forced: ForcedStage) -> Tensor:
    heads, bias = forced["head outputs"], forced.weight("bo")
    batch, _, length, _ = heads.shape
    joined = heads.reshape(batch, length, -1)
    projected = joined @ forced.model.weights["wo"].flatten(0, 1)
    return projected if bias is None else projected + bias
