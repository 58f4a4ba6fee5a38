"""The softmax is over queries, heads or the batch in place of keys."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import ClassVar

from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.simulation.attention_model import ForcedStage


class SoftmaxAxisCause(Cause):
    """The softmax is over queries, heads or the batch in place of keys.

    `softmax(dim=1)` of (batch, heads, queries, keys) is over heads. The old default of `F.softmax`
    without a dim was 1 there.

    Wrong:
        weights = scores.softmax(dim=1)

    Right:
        weights = scores.softmax(dim=-1)

    Repair:
        `scores.softmax(dim=-1)`, over keys.

    Confused with:
        q and k exchanged: a softmax over queries of transposed scores is one over keys.
    """

    name: ClassVar[str] = "softmax axis"
    symptom: ClassVar[str] = (
        "Attention weights of a query do not add up to 1: softmax over the wrong dim"
    )
    stages: ClassVar[tuple[str, ...]] = ("weights",)

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the softmax over each other axis."""
        for axis, words in ((2, "queries"), (1, "heads"), (0, "batch")):
            model = evidence.model.with_stage_function("weights", partial(_softmax_over_axis, axis))
            yield Variant(model, {"axis": words}, "scores.softmax(dim=-1), over keys")


def _softmax_over_axis(axis: int, forced: ForcedStage) -> Tensor:
    return forced["scores"].softmax(axis).nan_to_num(0.0)
