"""The projection (batch, length, heads * d) is viewed as (batch, heads, length, d)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.simulation.attention_model import Forced


class SplitWithoutTransposeCause(Cause):
    """The projection (batch, length, heads * d) is viewed as (batch, heads, length, d)."""

    name: ClassVar[str] = "split without transpose"
    symptom: ClassVar[str] = "Heads mix tokens: the first head sees the first tokens alone"
    stages: ClassVar[tuple[str, ...]] = ("q", "k", "v")

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the view of q, of k, of v, and of several."""
        for roles in ("qkv", "qk", "q", "k", "v"):
            model = evidence.model
            for role in roles:
                model = model.with_stage(role, _viewed)
            names = ", ".join(roles)
            yield Variant(model, {"roles": names}, "view(batch, length, heads, d).transpose(1, 2)")


def _viewed(forced: Forced) -> Tensor:
    split = forced.usual()
    joined = split.transpose(1, 2).flatten(2)
    return joined.reshape(split.shape)
