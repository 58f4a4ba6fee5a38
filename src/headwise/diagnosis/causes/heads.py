"""Causes in the number of heads: some are gone, or give nothing, as after pruning."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headwise.diagnosis.catalogue import NORMED
from headwise.diagnosis.causes.evidence import Evidence, Variant, Variants
from headwise.diagnosis.causes.parts import contributions, solve_heads
from headwise.diagnosis.simulation import gaps
from headwise.diagnosis.simulation.model import AttentionModel, RecordedCall
from headwise.function.distance import slopes_of
from headwise.function.spec import AlibiRule
from headwise.function.weights import take_heads


def _heads_gone(evidence: Evidence) -> Variants:
    """Yield the model without the heads that are gone, with another bias where that is all else.

    Where heads were taken out, the recorded queries and keys tell which are left. Where rows of the
    output projection are 0, the output is without what these heads add.
    """
    for model, gone in _models_without_heads(evidence):
        parameters: dict[str, object] = {"without heads": gone}
        repair = "put these heads back, from the weights of the second"
        shifted = _with_mean_gap_in_bias(model, evidence.calls)
        if shifted is not None and not _output_parts(shifted, evidence.calls):
            parameters["bias"] = "another one"
            yield Variant(shifted, parameters, f"{repair}, and the bias of its output")
        else:
            yield Variant(model, parameters, repair)


def _output_parts(model: AttentionModel, calls: Sequence[RecordedCall]) -> bool:
    return bool(gaps.measure_gaps(model, calls, ("output",)).cells_beyond_rounding)


def _models_without_heads(evidence: Evidence) -> list[tuple[AttentionModel, tuple[int, ...]]]:
    model = evidence.model
    total = range(model.settings.num_heads)
    if (left := _find_recorded_heads(evidence)) is not None:
        heads, kv_heads = left
        return [(_take(model, heads, kv_heads), tuple(sorted({*total} - {*heads})))]
    off = _find_silent_heads(evidence)
    if not off or len(off) == len(total):
        return []
    wo = model.weights["wo"].clone()
    wo[list(off)] = 0
    return [(model.with_weights(wo=wo), off)]


def _take(
    model: AttentionModel, heads: tuple[int, ...], kv_heads: tuple[int, ...]
) -> AttentionModel:
    """Return the model of these heads alone."""
    settings = replace(model.settings, num_heads=len(heads), num_kv_heads=len(kv_heads))
    rule = settings.score_bias
    if isinstance(rule, AlibiRule):
        slopes = slopes_of(model.settings)
        assert slopes is not None
        kept = tuple(slopes[list(heads)].tolist())
        settings = replace(settings, score_bias=replace(rule, slopes=kept))
    return replace(model, settings=settings, weights=take_heads(model.weights, heads, kv_heads))


def _find_recorded_heads(evidence: Evidence) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the model's heads, and kv heads, that the recorded ones are; None where some are none.

    There are fewer recorded heads than the model has.
    """
    model, stages = evidence.model, [evidence.shown_stages[role] for role in ("q", "k")]
    if {*stages} - {*NORMED, "q", "k"}:  # neither was recorded
        return None
    calls = [call for call in evidence.calls if {*stages} <= {*call.stages}]
    if not calls:
        return None
    call = min(calls, key=lambda call: call.inputs.x.numel())
    if call.stages[stages[0]].shape[1] >= model.settings.num_heads:
        return None
    heads, kv_heads = (_match_heads(model, call, stage) for stage in stages)
    if heads is None or kv_heads is None or len(heads) % len(kv_heads):
        return None
    group = len(heads) // len(kv_heads)
    sources = [kv_heads[place // group] for place in range(len(heads))]
    belongs = all(
        head // model.settings.group == kv for head, kv in zip(heads, sources, strict=True)
    )
    return (heads, kv_heads) if belongs else None


def _match_heads(model: AttentionModel, call: RecordedCall, stage: str) -> tuple[int, ...] | None:
    """Return the model's head that each recorded head is, by its queries or keys."""
    forced, recorded = model.prepare_stage(stage, call), call.stages[stage]
    predicted, bound = forced.result, gaps.allowed_difference(forced)
    if recorded.shape[::3] != predicted.shape[::3] or recorded.shape[2] != predicted.shape[2]:
        return None
    matched = []
    for head in recorded.unbind(1):
        apart = (predicted - head[:, None]).abs() <= bound
        fits = [
            n for n, each in enumerate(apart.unbind(1)) if bool(each.all()) and n not in matched
        ]
        if not fits:
            return None
        matched.append(fits[0])
    return tuple(matched)


def _find_silent_heads(evidence: Evidence) -> tuple[int, ...]:
    """Return the heads without which the model's output is the recorded one, up to a constant."""
    model = evidence.model
    calls = [call for call in evidence.calls if "output" in call.stages]
    if any(gaps.list_misshapen_stages(model, call) for call in calls):
        return ()
    wo, sums = model.weights["wo"], list[tuple[Tensor, Tensor]]()
    for call in calls:
        forced = model.prepare_stage("output", call)
        recorded = call.stages["output"]
        if forced["head outputs"].shape[1] != len(wo) or forced.result.shape != recorded.shape:
            return ()
        parts = contributions(model, call).flatten(1, 2)
        sums.append((parts, (recorded - forced.result).flatten(0, 1)))
    if not sums:
        return ()
    parts, left = (torch.cat(each, -2) for each in zip(*sums, strict=True))
    parts, left = (x - x.mean(-2, keepdim=True) for x in (parts, left))
    if not bool(left.isfinite().all()):
        return ()
    return solve_heads(parts.flatten(1), -left.flatten()) or ()


def _with_mean_gap_in_bias(
    model: AttentionModel, calls: Sequence[RecordedCall]
) -> AttentionModel | None:
    """Return the model whose output has the mean of the recorded one; None where it has it."""
    call = next((call for call in calls if "output" in call.stages), None)
    if call is None:
        return None
    forced = model.prepare_stage("output", call)
    if forced.result.shape != call.stages["output"].shape:
        return None
    gap = (call.stages["output"] - forced.result).flatten(0, 1).mean(0)
    if bool((gap.abs() <= gaps.allowed_difference(forced).amax()).all()):
        return None
    return model.with_weights(bo=gap + model.weights.get("bo", torch.zeros_like(gap)))
