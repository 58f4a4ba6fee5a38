"""The learned logit of the softmax is missing, or is another number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant


class SinksCause(Cause):
    """The learned logit of the softmax is missing, or is another number.

    gpt-oss has a logit for each head, which takes a share of the weight and has no value. Without
    it the weights of a row add up to 1, and all outputs are too large.

    Wrong:
        weights = scores.softmax(-1)

    Right:
        weights = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], -1).softmax(-1)[..., :-1]

    Repair:
        Load `sinks`: `Attention(..., sink=True)`.
    """

    name: ClassVar[str] = "sinks"
    symptom: ClassVar[str] = (
        "gpt-oss attention sinks are missing: weights of a row add up to 1 where they should not"
    )
    stages: ClassVar[tuple[str, ...]] = ("weights",)

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return no sink, and the logits that the recorded sums of weights state."""
        sink = evidence.model.weights.get("sink")
        repair = "load the sinks: one logit for each head, in the denominator alone"
        if sink is not None:
            yield Variant(evidence.model.with_weights(sink=None), {"sinks": "none"}, repair)
        stated = _infer_sink_logits(evidence)
        if stated is not None:
            model = evidence.model.with_weights(sink=stated)
            repair = repair if sink is not None else "leave the sinks out"
            yield Variant(model, {"sinks": [round(float(logit), 6) for logit in stated]}, repair)


def _infer_sink_logits(evidence: Evidence) -> Tensor | None:
    """Return a logit for each head: exp(sink) = sum of exp(scores) * (1 / sum of weights - 1)."""
    logits = []
    for call in evidence.calls:
        scores, weights = call.stages.get("scores"), call.stages.get("weights")
        if scores is None or weights is None or scores.shape != weights.shape:
            return None
        rest = 1 / weights.sum(-1) - 1
        logits.append((scores.logsumexp(-1) + rest.log()).transpose(0, 1).flatten(1))
    each = torch.cat(logits, 1)
    stated = each.nanmedian(1).values
    return stated if bool(stated.isfinite().all()) else None
