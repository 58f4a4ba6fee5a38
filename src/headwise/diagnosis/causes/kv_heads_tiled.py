"""Kv heads tiled where they should be repeated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from headwise.diagnosis.causes.cause import Evidence, Family, Variant
from headwise.diagnosis.causes.moved_projections import MovedProjectionsCause
from headwise.diagnosis.simulation.attention_model import AttentionModel, Forced


class KVHeadsTiledCause(MovedProjectionsCause):
    """Query heads share kv heads in the order 0 1 0 1 in place of 0 0 1 1."""

    name: ClassVar[str] = "kv heads tiled instead of repeated"
    symptom: ClassVar[str] = (
        "Grouped-query attention is wrong after an export, multi-head attention is right"
    )
    stages: ClassVar[tuple[str, ...]] = ("q", "k", "v", "scores", "head outputs", "output")
    cost: ClassVar[float] = 1.04

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return tiled weights, and tiled heads of keys, of values or of both."""
        yield from super().variants(evidence)
        settings = evidence.model.settings
        if not 1 < settings.num_kv_heads < settings.num_heads:
            return
        for stages in (("scores", "head outputs"), ("scores",), ("head outputs",)):
            model = evidence.model
            for stage in stages:
                model = model.with_stage(stage, _tiled)
            repair = "k.repeat_interleave(group, dim=heads) in place of k.repeat(group), v likewise"
            yield Variant(model, {"kv_heads": settings.num_kv_heads}, repair)


def _tiled(forced: Forced) -> Tensor:
    """Return a stage whose head h takes kv head h % kv_heads."""
    settings = forced.settings
    heads = torch.arange(settings.num_heads)
    places = heads % settings.num_kv_heads * settings.group + heads // settings.num_kv_heads
    order = places.argsort()
    source = "q after rotary" if forced.stage == "scores" else "weights"
    stages = {**forced.call.stages, source: forced[source][:, order]}
    model: AttentionModel = forced.model
    if settings.slopes is not None:
        model = model.with_settings(slopes=settings.slopes[order])
    return replace(forced, model=model, call=forced.call.with_stages(stages)).usual()[:, places]
