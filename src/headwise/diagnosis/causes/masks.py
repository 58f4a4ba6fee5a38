"""Causes in masks, and in calls with earlier keys.

Masks have another polarity, alignment or window, and padding is on another side. Later calls have
other positions, windows or padding, or lack keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from headwise.diagnosis import catalogue
from headwise.diagnosis.catalogue import PLACED, SCORES, Cause
from headwise.diagnosis.causes.evidence import (
    Evidence,
    Search,
    Variant,
    Variants,
    replace_inputs,
)
from headwise.diagnosis.simulation.model import (
    AttentionModel,
    ForcedStage,
    compute_scores,
    key_query_distances,
)
from headwise.diagnosis.simulation.stages import RecordedCall
from headwise.function.stages import repeat_kv_heads

MOST_SHIFTS = 12


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
            model = free.with_stage_function("scores", _scores_with_top_left_mask)
            yield Variant(model, {"align": "top-left"}, 'Mask.causal(align="bottom-right")')


def _scores_with_top_left_mask(forced: ForcedStage) -> Tensor:
    """Return scores in which query i of the call attends to the first i + 1 keys of all."""
    scores = forced.usual_result()
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(~seen, -torch.inf)


MaskChange = Callable[[Tensor], Tensor | None]


def change_mask_of_model(evidence: Evidence, change: MaskChange) -> AttentionModel:
    """Return the model under a changed mask."""
    return evidence.model.with_stage_function(
        "scores", lambda forced: change_mask(change, forced).usual_result()
    )


def _scores_with_mask(change: MaskChange, forced: ForcedStage) -> Tensor:
    return change_mask(change, forced).usual_result()


def change_mask(change: MaskChange, forced: ForcedStage) -> ForcedStage:
    """Return the stage under a changed mask."""
    mask = forced.call.inputs.mask
    return forced if mask is None else replace_inputs(forced, mask=change(mask))


def _mask_added_as_numbers(evidence: Evidence) -> Variants:
    if evidence.has_masks:
        for is_inverted in (False, True):
            model = evidence.model.with_stage_function(
                "scores", partial(_add_mask_as_numbers, is_inverted)
            )
            yield Variant(model, {}, "hide keys: scores.masked_fill(~mask, -inf)")


def _add_mask_as_numbers(is_inverted: bool, forced: ForcedStage) -> Tensor:
    mask, usual = forced.call.inputs.mask, compute_scores(replace_inputs(forced, mask=None))
    if mask is None:
        return usual
    return usual + (~mask if is_inverted else mask).to(usual.dtype)


# Numbers that hide a key when they are added to its score.
LOWEST = (-1e4, -1e9, torch.finfo(torch.float32).min)


def _mask_polarity(evidence: Evidence) -> Variants:
    if evidence.has_masks:
        repair = "pass ~mask: True means may attend"
        model = change_mask_of_model(evidence, torch.logical_not)
        yield Variant(model, {}, repair)
        for number in LOWEST:
            model = evidence.model.with_stage_function(
                "scores", partial(_add_number_where_true, number)
            )
            yield Variant(model, {"added": number}, repair)


def _add_number_where_true(number: float, forced: ForcedStage) -> Tensor:
    mask = forced.call.inputs.mask
    if mask is None:
        return forced.usual_result()
    usual = change_mask(lambda _: None, forced).usual_result()
    return usual + number * mask.to(usual.dtype)


def _padding_ignored(evidence: Evidence) -> Variants:
    if evidence.has_masks:
        yield Variant(change_mask_of_model(evidence, lambda _: None), {}, "pass the mask on")


def _padding_side(evidence: Evidence) -> Variants:
    if evidence.has_masks:
        model = change_mask_of_model(evidence, lambda mask: mask.flip(-1))
        yield Variant(model, {}, 'Mask.lengths(..., side="left"), or side="right"')


def _rows_without_keys(evidence: Evidence) -> Variants:
    if any(
        bool(_find_empty_rows(evidence.model.predict_stage("scores", call)).any())
        for call in evidence.calls
    ):
        for words, value in (("NaN", math.nan), ("equal weights", None), ("weights of 1", 1.0)):
            model = evidence.model.with_stage_function("weights", partial(_fill_empty_rows, value))
            yield Variant(model, {"row": words}, "give such rows zeros")


def _find_empty_rows(scores: Tensor) -> Tensor:
    return (scores == -math.inf).all(-1, keepdim=True)


def _fill_empty_rows(value: float | None, forced: ForcedStage) -> Tensor:
    scores = forced["scores"]
    other = 1 / scores.shape[-1] if value is None else value
    return torch.where(_find_empty_rows(scores), other, forced.usual_result())


MOST_KEYS = 40


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
    for length in dict.fromkeys(
        (None, *near, *range(MOST_KEYS), *_largest_distances_before_and_after(evidence))
    ):
        keys = "all" if length is None else length + 1
        if length != left:
            far = length if right is not None and right == left else right
            model = evidence.model.with_settings(window=(length, far))
            yield Variant(model, {"window": keys}, repair)
        if right and length != right:
            model = evidence.model.with_settings(window=(left, length))
            yield Variant(model, {"window after": keys}, repair)


def _variants_of_windowed_masks(evidence: Evidence) -> Iterator[Variant]:
    """Return other windows of masks that hold one themselves, as those of transformers do."""
    lefts = [_infer_left_window_from_mask(call) for call in evidence.calls]
    if None in lefts:
        return
    left = max(each for each in lefts if each is not None)
    for length in (None, *range(MOST_KEYS)):
        if length != left:
            model = evidence.model.with_stage_function(
                "scores", partial(_scores_with_window, length)
            )
            keys = "all" if length is None else length + 1
            yield Variant(model, {"window": keys}, f"sliding_window={left + 1}")


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
    return replace_inputs(forced, mask=whole).usual_result()


def _largest_distances_before_and_after(evidence: Evidence) -> tuple[int, int]:
    """Return the largest distances at which recorded scores show a key before and after."""
    before, after = [0], [0]
    for call in evidence.calls:
        scores = call.stages.get("scores")
        if scores is not None and scores.shape[-1] == call.key_positions.shape[1]:
            ahead = key_query_distances(call).expand(scores.shape)[scores.isfinite()]
            if ahead.numel():
                before.append(-int(ahead.min()))
                after.append(int(ahead.max()))
    return max(before), max(after)


def change_model_in_later_calls(
    evidence: Evidence, stages: Sequence[str], change: Callable[[ForcedStage], ForcedStage]
) -> AttentionModel:
    """Return the model with stages that are changed in calls with earlier keys."""

    def in_later_calls(forced: ForcedStage) -> Tensor:
        return (change(forced) if forced.call.earlier else forced).usual_result()

    model = evidence.model
    for stage in stages:
        model = model.with_stage_function(stage, in_later_calls)
    return model


def change_call_positions(
    call: RecordedCall, position: Callable[[RecordedCall], Tensor | None]
) -> RecordedCall:
    """Return the call with other positions, also in those of its earlier calls that are later."""
    if not call.earlier:
        return call
    return replace(
        call,
        inputs=replace(call.inputs, positions=position(call)),
        earlier=tuple(change_call_positions(each, position) for each in call.earlier),
    )


MOST_POSITIONS = 16


def _position_in_decoding(evidence: Evidence) -> Variants:
    if not evidence.has_later_calls:
        return
    offsets: list[int | None] = [
        None,
        *(n for n in range(-MOST_POSITIONS, MOST_POSITIONS + 1) if n),
    ]
    for offset in offsets:
        model = change_model_in_later_calls(
            evidence, PLACED, partial(_place_later_calls, partial(_shift_positions, offset))
        )
        words = "from 0 again" if offset is None else offset
        yield Variant(model, {"offset": words}, "positions continue from the keys in the cache")


def _shift_positions(offset: int | None, call: RecordedCall) -> Tensor:
    return call.query_positions + (-call.past_key_count if offset is None else offset)


def _place_later_calls(
    position: Callable[[RecordedCall], Tensor | None], forced: ForcedStage
) -> ForcedStage:
    """Return the stage with other positions in all calls with earlier keys."""
    return replace(forced, call=change_call_positions(forced.call, position))


def _window_in_decoding(evidence: Evidence) -> Variants:
    settings = evidence.model.settings
    if not evidence.has_later_calls:
        return
    left, right = (None, None) if settings.sides is None else settings.sides
    for other in (None, *range(MOST_KEYS)):
        if other != left:
            window = None if other is None else (other, right)
            changed = evidence.model.with_settings(window=window)
            model = change_model_in_later_calls(evidence, SCORES, partial(replace, model=changed))
            keys = "all" if other is None else other + 1
            repair = "no window" if left is None else f"window=({left}, 0) in every call"
            yield Variant(model, {"window": keys}, repair)


MASKS: tuple[tuple[MaskChange, str], ...] = (
    (lambda _: None, "mask ignored"),
    (lambda mask: mask.flip(-1), "mask at the other end"),
    (torch.logical_not, "mask inverted"),
)
REPAIR = 'Mask.lengths(..., side="left") in every call with the cache'


def _padding_in_decoding(evidence: Evidence) -> Variants:
    if not evidence.has_later_calls:
        return
    for change, words in MASKS if evidence.has_masks else ():
        model = change_model_in_later_calls(evidence, SCORES, partial(change_mask, change))
        yield Variant(model, {"padding": words}, REPAIR)
    if any(call.inputs.positions is not None for call in evidence.calls):
        repair = "positions that count the tokens and not the padding, in every call"
        model = change_model_in_later_calls(
            evidence, PLACED, partial(_place_later_calls, lambda _: None)
        )
        yield Variant(model, {"padding": "counted in the positions"}, repair)


FIRST = (0, 1, 2, 4)  # keys at the start that a cache may keep as attention sinks


@dataclass(frozen=True)
class Eviction:
    """The keys that are left of those of earlier calls.

    Attributes:
        first, last: numbers of keys that stay, of the start and of the end.
        missing: number of keys at the start that do not stay; 0 to state ``last``.
        holds_new: True if the new keys of a call, which always stay, are among the last ones.
    """

    first: int = 0
    last: int = 0
    missing: int = 0
    holds_new: bool = False

    def remaining_keys(self, call: RecordedCall) -> Tensor:
        """Return the numbers of the keys of a call."""
        count = call.key_positions.shape[1]
        if not call.earlier:
            return torch.arange(count)
        new = count - call.past_key_count
        size = max(self.last, new) if self.holds_new else self.last + new
        start = min(self.missing, call.past_key_count) or max(count - size, self.first)
        return torch.cat([torch.arange(self.first), torch.arange(start, count)])

    @property
    def parameters(self) -> dict[str, int]:
        """The numbers for a report."""
        if self.missing:
            return {"missing": self.missing}
        return {"kept": self.last} | ({"first": self.first} if self.first else {})


def list_evictions(past: int) -> Iterator[Eviction]:
    """Return evictions of up to ``past`` keys."""
    for last in range(past):
        yield Eviction(missing=last + 1)
        for first in FIRST:
            yield Eviction(first, last)
            yield Eviction(first, last, holds_new=True)


def _evicted_keys(evidence: Evidence) -> Variants:
    later = next((call for call in evidence.calls if call.earlier), None)
    if later is None:
        return
    columns, every = _count_key_columns(later), later.key_positions.shape[1]
    if evidence.model.predict_stage("scores", later).shape[-1] != every:
        return  # keys are dropped already
    for eviction in list_evictions(max(call.past_key_count for call in evidence.calls)):
        if columns == every:
            model = evidence.model.with_stage_function(
                "scores", partial(_hide_evicted_keys, eviction)
            )
        elif len(eviction.remaining_keys(later)) == columns:
            model = evidence.model.with_stage_function(
                "scores", partial(_drop_evicted_keys, eviction)
            )
            model = model.with_stage_function(
                "head outputs", partial(_mix_remaining_values, eviction)
            )
        else:
            continue
        repair = "a cache that holds every token of the sequence"
        yield Variant(model, eviction.parameters, repair)


def _count_key_columns(call: RecordedCall) -> int:
    """Return the number of keys in the recorded scores or weights."""
    recorded = (call.stages[stage] for stage in ("scores", "weights") if stage in call.stages)
    return next((x.shape[-1] for x in recorded), call.key_positions.shape[1])


def _hide_evicted_keys(eviction: Eviction, forced: ForcedStage) -> Tensor:
    scores = forced.usual_result()
    is_left = torch.zeros(scores.shape[-1], dtype=torch.bool)
    is_left[eviction.remaining_keys(forced.call)] = True
    return scores.masked_fill(~is_left, -torch.inf)


def _drop_evicted_keys(eviction: Eviction, forced: ForcedStage) -> Tensor:
    return forced.usual_result()[..., eviction.remaining_keys(forced.call)]


def _mix_remaining_values(eviction: Eviction, forced: ForcedStage) -> Tensor:
    """Return the head outputs of weights over the keys that are left."""
    weights, values = (
        forced["weights"],
        forced.values_of_all_calls[:, :, eviction.remaining_keys(forced.call)],
    )
    return weights @ repeat_kv_heads(values, heads=weights.shape[1])


SEARCHES: dict[Cause, Search] = {
    catalogue.CAUSAL_ALIGNMENT: _causal_alignment,
    catalogue.MASK_ADDED_AS_NUMBERS: _mask_added_as_numbers,
    catalogue.MASK_POLARITY: _mask_polarity,
    catalogue.PADDING_IGNORED: _padding_ignored,
    catalogue.PADDING_SIDE: _padding_side,
    catalogue.ROWS_WITHOUT_KEYS: _rows_without_keys,
    catalogue.WINDOW_OFF_BY_ONE: _window_off_by_one,
    catalogue.POSITION_IN_DECODING: _position_in_decoding,
    catalogue.WINDOW_IN_DECODING: _window_in_decoding,
    catalogue.PADDING_IN_DECODING: _padding_in_decoding,
    catalogue.EVICTED_KEYS: _evicted_keys,
}
