"""Kv heads tiled where they should be repeated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from headwise.diagnosis.causes.cause import Evidence, Family, Variant
from headwise.diagnosis.causes.moved_projections_base import MovedProjectionsCause
from headwise.diagnosis.simulation.attention_model import AttentionModel, ForcedStage


class KVHeadsTiledCause(MovedProjectionsCause):
    """Query heads share kv heads in the order 0 1 0 1 in place of 0 0 1 1.

    Llama and almost all others repeat each kv head for the query heads of its group. x-transformers
    and the first ONNX Attention operator tile the kv heads. The two are equal with one kv head, and
    with as many as heads.

    Wrong:
        k = k.repeat(1, heads // kv_heads, 1, 1)

    Right:
        k = k.repeat_interleave(heads // kv_heads, dim=1)

    Repair:
        Repeat in place of tiling, for keys and for values. Or permute the heads of q and the
        columns of the output projection: `headwise convert` does so between `x-transformers` and
        `llama`.

    Confused with:
        heads permuted: tiled heads are a permutation of q and of the output projection.
        output heads in another group order: if the queries were permuted already.
    """

    name: ClassVar[str] = "kv heads tiled instead of repeated"
    symptom: ClassVar[str] = (
        "Grouped-query attention is wrong after an ONNX or x-transformers port; multi-head is right"
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
                model = model.with_stage_function(stage, _tile_kv_heads)
            repair = "k.repeat_interleave(group, dim=heads) in place of k.repeat(group), v likewise"
            yield Variant(model, {"kv_heads": settings.num_kv_heads}, repair)


def _tile_kv_heads(forced: ForcedStage) -> Tensor:
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
    return replace(forced, model=model, call=forced.call.with_stages(stages)).usual_result()[
        :, places
    ]
