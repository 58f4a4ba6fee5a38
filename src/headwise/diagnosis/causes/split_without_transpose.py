"""The projection (batch, length, heads * d) is viewed as (batch, heads, length, d)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.simulation.attention_model import ForcedStage


class SplitWithoutTransposeCause(Cause):
    """The projection (batch, length, heads * d) is viewed as (batch, heads, length, d).

    The view keeps the order of memory. Head 0 then holds the first tokens, with all their channels.
    With one head, or one token, the two are equal.

    Wrong:
        q = wq(x).view(batch, heads, length, d)

    Right:
        q = wq(x).view(batch, length, heads, d).transpose(1, 2)

    Repair:
        View first as (batch, length, heads, d), then transpose.

    Confused with:
        merge without transpose: code that splits so often merges so.
        number of heads: for one token, where every split is the same.
    """

    name: ClassVar[str] = "split without transpose"
    symptom: ClassVar[str] = (
        "Heads mix tokens: q, k, v were split by view(batch, heads, length, d) without a transpose"
    )
    stages: ClassVar[tuple[str, ...]] = ("q", "k", "v")

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the view of q, of k, of v, and of several."""
        for roles in ("qkv", "qk", "q", "k", "v"):
            model = evidence.model
            for role in roles:
                model = model.with_stage_function(role, _view_as_heads)
            names = ", ".join(roles)
            yield Variant(model, {"roles": names}, "view(batch, length, heads, d).transpose(1, 2)")


def _view_as_heads(forced: ForcedStage) -> Tensor:
    split = forced.usual_result()
    joined = split.transpose(1, 2).flatten(2)
    return joined.reshape(split.shape)
