"""Causes in the scores and their softmax.

The scale, the softcap and the bias by distance; the axis, the dtype and the sinks of the softmax,
and dropout of its weights.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from headwise.diagnosis import catalogue
from headwise.diagnosis.catalogue import Cause
from headwise.diagnosis.causes.evidence import (
    Evidence,
    Family,
    Search,
    Variant,
    Variants,
)
from headwise.diagnosis.moves.move import find_factor_formula
from headwise.diagnosis.simulation.model import ForcedStage
from headwise.function.distance import slopes_of
from headwise.function.spec import Softcap
from headwise.layers.distance import alibi_slopes


def _scale(evidence: Evidence) -> Variants:
    right, wq = evidence.model.settings.factor, evidence.model.weights["wq"]
    _, head_dim, width = wq.shape

    def make(scale: float) -> Variant:
        model = evidence.model.with_settings(scale=scale)
        form = find_factor_formula(scale, head_dim=head_dim, width=width)
        repair = f"scale={right:.12g} in place of {scale:.6g}"
        return Variant(model, {"scale": scale}, repair, {"form": form} if form else {})

    yield Family(make, tuple(right * 4.0**n for n in range(-4, 5)), is_log=True)


def _scale_twice(evidence: Evidence) -> Variants:
    right = evidence.model.settings.factor
    if right != 1.0:
        model = evidence.model.with_settings(scale=right**2)
        yield Variant(model, {"scale": right**2}, "scale q or the scores, not both")


def _softcap(evidence: Evidence) -> Variants:
    right = evidence.model.settings.cap
    repair = "softcap=None" if right is None else f"softcap={right:g}"
    if right is not None:
        yield Variant(evidence.model.with_settings(softcap=None), {"softcap": "none"}, repair)

    def make(softcap: float) -> Variant:
        model = evidence.model.with_settings(softcap=Softcap(softcap))
        return Variant(model, {"softcap": softcap}, repair)

    yield Family(make, tuple(2.0**n for n in range(-1, 9)), is_log=True)


def _distance_bias_coefficient(evidence: Evidence) -> Variants:
    model, slopes = evidence.model, slopes_of(evidence.model.settings)
    if model.settings.buckets is not None:
        return  # a bias of another form
    is_missing = slopes is None
    if slopes is None:
        slopes = alibi_slopes(model.settings.num_heads).double()
    else:
        none = model.with_slopes(None)
        yield Variant(none, {"coefficient": 0.0}, "add the bias by distance: Alibi()")

    def make(factor: float) -> Variant:
        changed = model.with_slopes(factor * slopes)
        repair = f"slopes divided by {factor:.6g}"
        repair = "leave out the bias by distance" if is_missing else repair
        return Variant(changed, {"coefficient": factor}, repair)

    yield Family(make, (-1.0, 0.5, 2.0, 8.0))


def _distance_bias_slope_rule(evidence: Evidence) -> Variants:
    slopes = slopes_of(evidence.model.settings)
    if slopes is None:
        return
    for rule, other in _slopes_of_every_rule(len(slopes)).items():
        if not torch.equal(other, slopes):
            model = evidence.model.with_slopes(other)
            yield Variant(model, {"rule": rule}, "alibi_slopes(num_heads)")


def _slopes_of_every_rule(heads: int) -> dict[str, Tensor]:
    """Return slopes by the name of their rule."""
    index = torch.arange(heads, dtype=torch.float64)
    lower = 2 ** math.floor(math.log2(heads))
    upper = 2 ** math.ceil(math.log2(heads))
    rules: dict[str, Tensor] = {}
    for most in (4.0, 8.0, 16.0):
        words = "" if most == 8.0 else f", bias_max {most:g}"
        rules[f"of the paper's code{words}"] = alibi_slopes(heads, bias_max=most).double()
        rules[f"2 ** (-{most:g} (h + 1) / n){words}"] = 2 ** (-most * (index + 1) / heads)
        rules[f"2 ** (-{most:g} h / n){words}"] = 2 ** (-most * index / heads)
        for name, power in (("lower", lower), ("upper", upper)):
            rules[f"of the {name} power of two{words}"] = 2 ** (-most * (index + 1) / power)
    rules["2 ** -(h + 1)"] = 2 ** -(index + 1)
    rules["2 ** -h"] = 2**-index
    rules["1 / (h + 1)"] = 1 / (index + 1)
    return rules | {f"{name}, reversed": slopes.flip(0) for name, slopes in rules.items()}


def _softmax_axis(evidence: Evidence) -> Variants:
    for axis, words in ((2, "queries"), (1, "heads"), (0, "batch")):

        def over_axis(forced: ForcedStage, axis: int = axis) -> Tensor:
            return forced["scores"].softmax(axis).nan_to_num(0.0)

        model = evidence.model.with_stage_function("weights", over_axis)
        yield Variant(model, {"axis": words}, "scores.softmax(dim=-1), over keys")


def _softmax_dtype(evidence: Evidence) -> Variants:
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


def _sinks(evidence: Evidence) -> Variants:
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


def _dropout_left_on(evidence: Evidence) -> Variants:
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


SEARCHES: dict[Cause, Search] = {
    catalogue.SCALE: _scale,
    catalogue.SCALE_TWICE: _scale_twice,
    catalogue.SOFTCAP: _softcap,
    catalogue.DISTANCE_BIAS_COEFFICIENT: _distance_bias_coefficient,
    catalogue.DISTANCE_BIAS_SLOPE_RULE: _distance_bias_slope_rule,
    catalogue.SOFTMAX_AXIS: _softmax_axis,
    catalogue.SOFTMAX_DTYPE: _softmax_dtype,
    catalogue.SINKS: _sinks,
    catalogue.DROPOUT_LEFT_ON: _dropout_left_on,
}
