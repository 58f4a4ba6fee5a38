"""Causes in the softmax: its axis, its dtype, its sinks, and dropout of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.simulation.model import ForcedStage


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


class SoftmaxDtypeCause(Cause):
    """The softmax is computed in a narrower dtype.

    Hugging Face's eager attention computes the softmax in float32. A softmax in bfloat16 keeps 8
    bits. A float64 run of code with a float32 softmax still differs by 1e-7.

    Wrong:
        weights = scores.softmax(-1)  # bfloat16

    Right:
        weights = scores.softmax(-1, dtype=torch.float32).to(scores.dtype)

    Repair:
        Compute the softmax in float32 in both, or in the dtype of the scores in both.

    Confused with:
        dtype's rounding of weights: in the outputs alone, of about the same size.
    """

    name: ClassVar[str] = "softmax dtype"
    symptom: ClassVar[str] = (
        "A bfloat16 model differs more than rounding explains: softmax in half precision"
    )
    stages: ClassVar[tuple[str, ...]] = ("weights",)

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the softmax in each narrower dtype."""
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for function in (
                _softmax_in_dtype,
                _softmax_of_rounded_scores,
                _round_softmax_and_scores,
            ):
                model = evidence.model.with_stage_function("weights", partial(function, dtype))
                name = str(dtype).removeprefix("torch.")
                yield Variant(model, {"dtype": name}, "softmax in the dtype of the scores")


def _softmax_in_dtype(dtype: torch.dtype, forced: ForcedStage) -> Tensor:
    return _softmax_with_sink(forced["scores"].to(dtype), forced).double()


def _softmax_of_rounded_scores(dtype: torch.dtype, forced: ForcedStage) -> Tensor:
    return _softmax_with_sink(forced["scores"].to(dtype).double(), forced)


def _round_softmax_and_scores(dtype: torch.dtype, forced: ForcedStage) -> Tensor:
    return _softmax_with_sink(forced["scores"].to(dtype).double(), forced).to(dtype).double()


def _softmax_with_sink(scores: Tensor, forced: ForcedStage) -> Tensor:
    sink = forced.weight("sink")
    if sink is None:
        return scores.softmax(-1).nan_to_num(0.0)
    column = sink.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


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


class DropoutLeftOnCause(Cause):
    """Weights are dropped at random, and the others multiplied by 1 / (1 - p).

    `scaled_dot_product_attention` drops weights whenever `dropout_p` is positive, after `eval()` as
    well.

    Wrong:
        F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)

    Right:
        F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)

    Repair:
        Call `eval()` before the comparison, and pass `dropout_p=0.0` outside of training.
    """

    name: ClassVar[str] = "dropout left on"
    symptom: ClassVar[str] = (
        "Two runs on the same input differ, because attention dropout is still on"
    )
    stages: ClassVar[tuple[str, ...]] = ("weights",)

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the recorded zeros with the factor of the weights that are left."""
        kept: dict[object, Tensor] = {}
        factors = []
        for call in evidence.calls:
            actual = call.stages.get("weights")
            usual = evidence.model.predict_stage("weights", call)
            if actual is None or actual.shape != usual.shape:
                return
            kept[call.key] = actual != 0
            ratio = (actual / usual)[(actual != 0) & (usual > 0)]
            factors.append(ratio)
        factor = float(torch.cat(factors).median()) if factors else 1.0
        if factor > 1.0 + 1e-6:
            rate = round(1 - 1 / factor, 12)
            model = evidence.model.with_stage_function(
                "weights", partial(_apply_recorded_dropout, kept, factor)
            )
            yield Variant(model, {"p": rate}, "call eval() before the comparison")


def _apply_recorded_dropout(
    kept: dict[object, Tensor], factor: float, forced: ForcedStage
) -> Tensor:
    usual = forced.usual_result()
    left = kept.get(forced.call.key)
    if left is None or left.shape != usual.shape:
        return usual
    return torch.where(left, factor * usual, 0.0)
