"""Causes in masks: another polarity, alignment or window, and padding on another side."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from headwise.diagnosis.catalogue import SCORES
from headwise.diagnosis.causes.eviction import Eviction, hide_evicted_keys
from headwise.diagnosis.causes.evidence import Evidence, Variant, Variants
from headwise.diagnosis.simulation.model import (
    AttentionModel,
    ForcedStage,
    RecordedCall,
    key_query_distances,
)

MOST_SHIFTS = 12
MOST_KEPT = 1 << 30  # keys of a cache that drops none


def _causal_alignment(evidence: Evidence) -> Variants:
    settings = evidence.model.settings
    left, right = settings.sides or (None, None)
    is_causal = settings.causal or right == 0
    repair = "a query attends to keys up to its own position" if is_causal else "no causal mask"
    for shift in range(-MOST_SHIFTS, MOST_SHIFTS + 1) if is_causal or right is None else ():
        if shift or not is_causal:
            model = evidence.model.with_settings(causal=False, window=(left, shift))
            yield Variant(model, {"shift": shift}, repair)
    if is_causal:
        free = evidence.model.with_settings(causal=False, window=(left, right or None))
        yield Variant(free, {"causal": False}, repair)
        if evidence.has_later_calls:
            yield from _align_later_calls(evidence, free, left)


def _align_later_calls(evidence: Evidence, free: AttentionModel, left: int | None) -> Variants:
    """Yield other causal masks of calls with earlier keys; ``free`` is the model without one."""
    freed = evidence.replace_stages(SCORES, _scores_of_later_calls, free)
    repair = "a query attends to keys up to its own position, also where a cache has some"
    yield Variant(freed, {"causal": False, "calls": "with a cache"}, repair)
    # The keys are those of all calls, or those that a window keeps, which may count from there too.
    bare = free.with_settings(window=None)
    for kept in (Eviction(last=MOST_KEPT), *([] if left is None else [Eviction(last=left)])):
        for model, window in ((free, None), *([] if left is None else [(bare, left)])):
            function = partial(_scores_with_top_left_mask, kept, window)
            changed = model.with_stage_function("scores", function)
            yield Variant(changed, {"align": "top-left"}, 'Mask.causal(align="bottom-right")')


def _scores_of_later_calls(other: AttentionModel, forced: ForcedStage) -> Tensor:
    return (replace(forced, model=other) if forced.call.earlier else forced).usual_result()


def _scores_with_top_left_mask(kept: Eviction, window: int | None, forced: ForcedStage) -> Tensor:
    """Return scores in which query i of the call attends to the first i + 1 keys of the cache."""
    scores, keys = forced.usual_result(), kept.remaining_keys(forced.call)
    if scores.shape[-1] != forced.call.key_positions.shape[1]:  # some are dropped already
        keys = torch.arange(scores.shape[-1])
    back = torch.arange(scores.shape[-2])[:, None] - torch.arange(len(keys))
    seen = torch.zeros(scores.shape[-2:], dtype=torch.bool)
    seen[:, keys] = (back >= 0) if window is None else (back >= 0) & (back <= window)
    return scores.masked_fill(~seen, -torch.inf)


MaskChange = Callable[[Tensor], Tensor | None]


def ignore_mask(_mask: Tensor) -> None:
    """Return no mask."""
    return


def flip_keys(mask: Tensor) -> Tensor:
    """Return the mask with its keys in reverse order."""
    return mask.flip(-1)


def change_mask(change: MaskChange, forced: ForcedStage) -> ForcedStage:
    """Return the stage of a call with another mask, where it has one."""
    mask = forced.call.inputs.mask
    return forced if mask is None else forced.with_inputs(mask=change(mask))


def _vary_mask(evidence: Evidence, change: MaskChange, repair: str) -> Variants:
    if evidence.has_masks:
        scores = evidence.replace_stages(SCORES, lambda x: change_mask(change, x).usual_result())
        yield Variant(scores, {}, repair)


def _padding_ignored(evidence: Evidence) -> Variants:
    return _vary_mask(evidence, ignore_mask, "pass the mask on")


def _padding_side(evidence: Evidence) -> Variants:
    return _vary_mask(evidence, flip_keys, 'Mask.lengths(..., side="left"), or side="right"')


def _mask_added_as_numbers(evidence: Evidence) -> Variants:
    for is_inverted in (False, True) if evidence.has_masks else ():
        model = evidence.replace_stages(SCORES, _add_mask, 1.0, is_inverted)
        yield Variant(model, {}, "hide keys: scores.masked_fill(~mask, -inf)")


def _add_mask(number: float, is_inverted: bool, forced: ForcedStage) -> Tensor:
    mask, usual = forced.call.inputs.mask, forced.with_inputs(mask=None).usual_result()
    if mask is None:
        return usual
    return usual + number * (~mask if is_inverted else mask).to(usual.dtype)


# Numbers that hide a key when they are added to its score.
LOWEST = (-1e4, -1e9, torch.finfo(torch.float32).min)


def _mask_polarity(evidence: Evidence) -> Variants:
    repair = "pass ~mask: True means may attend"
    yield from _vary_mask(evidence, torch.logical_not, repair)
    for number in LOWEST if evidence.has_masks else ():
        model = evidence.replace_stages(SCORES, _add_mask, number, False)
        yield Variant(model, {"added": number}, repair)


def _rows_without_keys(evidence: Evidence) -> Variants:
    scores = (evidence.model.predict_stage("scores", call) for call in evidence.calls)
    if any(bool(_find_empty_rows(each).any()) for each in scores):
        for words, value in (("NaN", math.nan), ("equal weights", None), ("weights of 1", 1.0)):
            model = evidence.replace_stages(("weights",), _fill_empty_rows, value)
            yield Variant(model, {"row": words}, "give such rows zeros")


def _find_empty_rows(scores: Tensor) -> Tensor:
    return (scores == -math.inf).all(-1, keepdim=True)


def _fill_empty_rows(value: float | None, forced: ForcedStage) -> Tensor:
    scores = forced["scores"]
    other = 1 / scores.shape[-1] if value is None else value
    return torch.where(_find_empty_rows(scores), other, forced.usual_result())


MOST_KEYS = 40


def count_window(length: int | None) -> int | str:
    """Return the number of keys in a window, the query's own included."""
    return "all" if length is None else length + 1


def _window_off_by_one(evidence: Evidence) -> Variants:
    settings = evidence.model.settings
    if settings.sides is None and not settings.causal:
        yield from _variants_of_windowed_masks(evidence)
        return
    left, right = settings.sides or (None, None)
    if right is not None:
        model = evidence.model.with_settings(window=None, causal=False)
        yield Variant(model, {"window": "none"}, f"window=({left}, {right})")
    repair = f"window=({left}, {0 if settings.causal else right})"
    near = [size + step for size in (left, right) if size for step in (-1, 1)]
    if evidence.has_later_calls and left is not None:
        model = evidence.model.with_settings(window=(None, right))
        hide = partial(hide_evicted_keys, Eviction(last=left))
        model = model.with_stage_function("scores", hide)
        yield Variant(model, {"window": "all keys of the cache and the call"}, repair)
    recorded = _largest_distances_before_and_after(evidence)
    for length in dict.fromkeys((None, *near, *range(MOST_KEYS), *recorded)):
        if length != left:
            far = length if right is not None and right == left else right
            model = evidence.model.with_settings(window=(length, far))
            yield Variant(model, {"window": count_window(length)}, repair)
        if right and length != right:
            model = evidence.model.with_settings(window=(left, length))
            yield Variant(model, {"window after": count_window(length)}, repair)


def _variants_of_windowed_masks(evidence: Evidence) -> Iterator[Variant]:
    """Yield other windows of masks that hold one themselves, as those of transformers do."""
    lefts = [_infer_left_window_from_mask(call) for call in evidence.calls]
    if None in lefts:
        return
    left = max(each for each in lefts if each is not None)
    for length in (None, *range(MOST_KEYS)):
        if length != left:
            model = evidence.replace_stages(SCORES, _scores_with_window, length)
            yield Variant(model, {"window": count_window(length)}, f"sliding_window={left + 1}")


def _infer_left_window_from_mask(call: RecordedCall) -> int | None:
    """Return the number of keys before the query in the window of a mask; None without one."""
    mask = call.inputs.mask
    if mask is None or not mask.any():
        return None
    mask, ahead = torch.broadcast_tensors(mask, key_query_distances(call))
    whole = _mask_without_window(call, mask)
    left = -int(ahead[mask].min())
    has_window = torch.equal(mask, whole & (ahead >= -left)) and not torch.equal(mask, whole)
    return left if has_window else None


def _mask_without_window(call: RecordedCall, mask: Tensor) -> Tensor:
    """Return the mask with every key that some query sees, up to the query if it is causal."""
    ahead = key_query_distances(call)
    whole = (mask.any(-1, keepdim=True) & mask.any(-2, keepdim=True)).expand(mask.shape)
    is_causal = not bool((mask & (ahead > 0)).any())
    return whole & (ahead <= 0) if is_causal else whole


def _scores_with_window(length: int | None, forced: ForcedStage) -> Tensor:
    mask = forced.call.inputs.mask
    assert mask is not None
    whole = _mask_without_window(forced.call, mask)
    whole = whole if length is None else whole & (key_query_distances(forced.call) >= -length)
    return forced.with_inputs(mask=whole).usual_result()


def _largest_distances_before_and_after(evidence: Evidence) -> tuple[int, int]:
    before, after = [0], [0]
    for call in evidence.calls:
        scores = call.stages.get("scores")
        if scores is not None and scores.shape[-1] == call.key_positions.shape[1]:
            ahead = key_query_distances(call).expand(scores.shape)[scores.isfinite()]
            if ahead.numel():
                before.append(-int(ahead.min()))
                after.append(int(ahead.max()))
    return max(before), max(after)
