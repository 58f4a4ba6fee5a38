"""The causal mask is shifted, or missing, or where it should not be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.simulation.attention_model import Forced

MOST = 12


class CausalAlignmentCause(Cause):
    """The causal mask is shifted, or missing, or where it should not be."""

    name: ClassVar[str] = "causal alignment"
    symptom: ClassVar[str] = "A query sees one token too many, or the last tokens of a longer cache"
    stages: ClassVar[tuple[str, ...]] = ("scores",)

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return causal masks shifted by up to MOST keys, none, and the shift to the last key."""
        settings = evidence.model.settings
        left = None if settings.window is None else settings.window[0]
        repair = (
            "a query attends to keys up to its own position"
            if settings.causal
            else "no causal mask"
        )
        for shift in range(-MOST, MOST + 1):
            if shift or not settings.causal:
                model = evidence.model.with_settings(causal=False, window=(left, shift))
                yield Variant(model, {"shift": shift}, repair)
        if settings.causal:
            free = evidence.model.with_settings(causal=False)
            yield Variant(free, {"causal": False}, repair)
            if any(call.earlier for call in evidence.calls):
                model = free.with_stage("scores", _top_left)
                yield Variant(model, {"align": "top-left"}, 'Mask.causal(align="bottom-right")')


def _top_left(forced: Forced) -> Tensor:
    """Return scores in which query i of the call attends to the first i + 1 keys of all."""
    scores = forced.usual()
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(~seen, -torch.inf)
