"""Reasons why inputs show no difference: scores that change nothing, settings out of reach."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from headwise.diagnosis.simulation.gaps import absolute_difference, allowed_difference
from headwise.diagnosis.simulation.model import (
    AttentionModel,
    Inputs,
    RecordedCall,
    has_masks_of_heads,
)
from headwise.function.spec import ABSENT, AttentionSpec, Sides, Softcap

ANOTHER_SCALE = 0.7  # of the scores: a head's share that most faults exceed
USUAL_CAP = 50.0  # of Gemma 2
ONE = 1 - 1e-6  # a weight that leaves nothing to the other keys


def explain_scores(model: AttentionModel, calls: Sequence[RecordedCall], unit: torch.dtype) -> str:
    """Return the reason why other scores would not change what was compared; "" if they would.

    The model is run with its scores multiplied by 0.7. Where that moves neither the weights, if
    they were recorded, nor else the output by more than rounding, equality says nothing about
    scores.
    """
    calls = [replace(call, dtype=unit) for call in calls]
    if any(_is_sensitive_to_scores(model, call) for call in calls):
        return ""
    return (
        describe_degenerate_attention(model, calls)
        or "another scale of the scores does not change the output on these inputs"
    )


def describe_degenerate_attention(model: AttentionModel, calls: Sequence[RecordedCall]) -> str:
    """Return the reason why these inputs hide most changes of the scores; "" for none."""
    bare = [replace(call, stages={}) for call in calls]
    keys = max(call.inputs.key_source.shape[1] for call in calls)
    if keys == 1:
        return "one key: its weight is 1 whatever the scores are"
    runs = [model.predict_all_stages(call) for call in bare]
    if all(not bool(run["v"].any()) for run in runs):
        return "zero values: no weight changes the output"
    if all(bool((run["weights"].amax(-1) > ONE).all()) for run in runs):
        return "saturated: outputs are equal because every softmax picked one key"
    values = [run["v"] for run in runs]
    eps = torch.finfo(torch.float32).eps
    if all(bool((v - v[:, :, :1]).abs().amax() <= eps * v.abs().amax()) for v in values):
        return "equal tokens: all values are equal, so weights change nothing"
    return ""


def describe_window(windows: Sequence[Sides | None], calls: Sequence[RecordedCall]) -> str:
    """Return the sentence on windows of other lengths, which these inputs do not show."""
    specs = (AttentionSpec(window=window or ABSENT) for window in windows)
    return _describe("window", [_state_window(AttentionModel(spec, {})) for spec in specs], calls)


def describe_setting(
    first: AttentionModel | None,
    second: AttentionModel | None,
    calls: Sequence[RecordedCall],
    unit: torch.dtype,
) -> str:
    """Return the sentence on a setting that one states and these inputs do not show; "" for none.

    Where both are known as data and have the same outputs, that is a setting in which they differ.
    Beside a function, it is one without which the known side would have the same outputs.
    """
    calls = [replace(call, dtype=unit) for call in calls]
    for name, state in (("window", _state_window), ("softcap", _state_softcap)):
        words = ["" if model is None else state(model) for model in (first, second)]
        if first is not None and second is not None:
            is_unseen = words[0] != words[1]
        elif known := first or second:
            others = _without_setting(known, name)
            is_unseen = not all(_is_seen(known, other, calls) for other in others)
        else:
            return ""
        if is_unseen:
            return _describe(name, words, calls)
    return ""


def _describe(name: str, words: Sequence[str], calls: Sequence[RecordedCall]) -> str:
    sides = zip(("first", "second"), words, strict=True)
    stated = " and ".join(f"{value} in the {side}" for side, value in sides if value)
    longest = max(call.key_positions.shape[1] for call in calls)
    return f"the {name} is {stated}, and inputs of {longest} tokens do not show it"


def _state_window(model: AttentionModel) -> str:
    left, right = model.settings.sides or (None, None)
    if left is None:
        return "none"
    return f"{left + 1} keys" if not right else f"{left} keys before and {right} after"


def _state_softcap(model: AttentionModel) -> str:
    return "none" if model.settings.cap is None else f"{model.settings.cap:g}"


def _without_setting(model: AttentionModel, name: str) -> list[AttentionModel]:
    if name == "softcap":
        return [] if model.settings.cap is None else [model.with_settings(softcap=None)]
    left, right = model.settings.sides or (None, None)
    sides = [(None, right)] * (left is not None) + [(left, None)] * (right is not None)
    return [model.with_settings(window=window) for window in sides]


def _is_seen(model: AttentionModel, other: AttentionModel, calls: Sequence[RecordedCall]) -> bool:
    return any(_differs(model, call, stage, other) for call in calls for stage in call.stages)


def find_changes(
    model: AttentionModel, calls: Sequence[RecordedCall], unit: torch.dtype
) -> tuple[str, ...]:
    """Return small changes of the settings that would move nothing recorded beyond rounding."""
    calls = [replace(call, dtype=unit) for call in calls]
    settings, changes = model.settings, {}
    if settings.rotation is not None:
        theta = settings.rotation.theta
        changes[f"a theta of {1.1 * theta:g}"] = model.with_rotary(theta=1.1 * theta)
    left, right = settings.sides or (None, None)
    if left is not None:
        changes["a window of one key more"] = model.with_settings(window=(left + 1, right))
    if settings.cap is None:
        changes[f"a softcap of {USUAL_CAP:g}"] = model.with_settings(softcap=Softcap(USUAL_CAP))
    return tuple(name for name, other in changes.items() if not _is_seen(model, other, calls))


def describe_reach(model: AttentionModel, inputs: Sequence[Inputs]) -> str:
    """Return the sentence on what inputs of a function ran, and what is beyond them."""
    keys, batch = (
        max(size) for size in zip(*((x.key_source.shape[1], len(x.x)) for x in inputs), strict=True)
    )
    masked = [each for each in inputs if each.mask is not None]
    has_heads = any(map(has_masks_of_heads, masked))
    kinds = "" if not masked else ", some with a mask for each head" if has_heads else ""
    beyond = ["a window", "a base of the rotation that changes with the length"]
    beyond = beyond if model.settings.rotation is not None else beyond[:1]
    unseen = [f"{' or '.join(beyond)} beyond {keys} keys"]
    unseen += ["a mask for each head"] if not has_heads and model.settings.num_heads > 1 else []
    return (
        f"ran up to {keys} keys in up to {batch} sequences, {len(masked)} of {len(inputs)} inputs "
        f"under a mask{kinds}; not seen: {', and '.join(unseen)}"
    )


def _is_sensitive_to_scores(model: AttentionModel, call: RecordedCall) -> bool:
    other = model.with_settings(scale=ANOTHER_SCALE * model.settings.factor)
    if not {"scores", "weights"} <= set(call.stages):
        stage = "weights" if "weights" in call.stages else "output"
        return _differs(model, replace(call, stages={}), stage, other)
    # From the recorded stages before each, so that only the rounding of one step counts.
    moved = replace(call, stages={**call.stages, "scores": ANOTHER_SCALE * call.stages["scores"]})
    return _differs(model, call, "scores", other) and _differs(model, call, "weights", model, moved)


def _differs(
    model: AttentionModel,
    call: RecordedCall,
    stage: str,
    other: AttentionModel,
    moved: RecordedCall | None = None,
) -> bool:
    theirs = other.predict_stage(stage, call if moved is None else moved)
    forced = model.prepare_stage(stage, call)
    apart = absolute_difference(forced.result, theirs)
    return bool((apart > allowed_difference(forced)).any())
