"""Causes in masks, and in calls with earlier keys.

Masks have another polarity, alignment or window, and padding is on another side. Later calls have
other positions, windows or padding, or lack keys.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from headwise.diagnosis.catalogue import PLACED, SCORES
from headwise.diagnosis.causes.evidence import Evidence, Variant, Variants
from headwise.diagnosis.simulation.model import (
    AttentionModel,
    ForcedStage,
    RecordedCall,
    key_query_distances,
)
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


def _ignore_mask(_mask: Tensor) -> None:
    return None


def _flip_keys(mask: Tensor) -> Tensor:
    return mask.flip(-1)


def _change_mask(change: MaskChange, forced: ForcedStage) -> ForcedStage:
    mask = forced.call.inputs.mask
    return forced if mask is None else forced.with_inputs(mask=change(mask))


def _vary_mask(evidence: Evidence, change: MaskChange, repair: str) -> Variants:
    if evidence.has_masks:
        scores = evidence.replace_stages(SCORES, lambda x: _change_mask(change, x).usual_result())
        yield Variant(scores, {}, repair)


def _padding_ignored(evidence: Evidence) -> Variants:
    return _vary_mask(evidence, _ignore_mask, "pass the mask on")


def _padding_side(evidence: Evidence) -> Variants:
    return _vary_mask(evidence, _flip_keys, 'Mask.lengths(..., side="left"), or side="right"')


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


def _count_window(length: int | None) -> int | str:
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
    recorded = _largest_distances_before_and_after(evidence)
    for length in dict.fromkeys((None, *near, *range(MOST_KEYS), *recorded)):
        if length != left:
            far = length if right is not None and right == left else right
            model = evidence.model.with_settings(window=(length, far))
            yield Variant(model, {"window": _count_window(length)}, repair)
        if right and length != right:
            model = evidence.model.with_settings(window=(left, length))
            yield Variant(model, {"window after": _count_window(length)}, repair)


def _variants_of_windowed_masks(evidence: Evidence) -> Iterator[Variant]:
    """Yield other windows of masks that hold one themselves, as those of transformers do."""
    lefts = [_infer_left_window_from_mask(call) for call in evidence.calls]
    if None in lefts:
        return
    left = max(each for each in lefts if each is not None)
    for length in (None, *range(MOST_KEYS)):
        if length != left:
            model = evidence.replace_stages(SCORES, _scores_with_window, length)
            yield Variant(model, {"window": _count_window(length)}, f"sliding_window={left + 1}")


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


def _change_later_calls(
    evidence: Evidence, stages: Sequence[str], change: Callable[[ForcedStage], ForcedStage]
) -> AttentionModel:

    def in_later_calls(forced: ForcedStage) -> Tensor:
        return (change(forced) if forced.call.earlier else forced).usual_result()

    return evidence.replace_stages(stages, in_later_calls)


Positions = Callable[[RecordedCall], Tensor | None]


def _place_later_calls(evidence: Evidence, position: Positions) -> AttentionModel:
    """Return the model with other positions of later calls, also of those before a call."""

    def place(call: RecordedCall) -> RecordedCall:
        if not call.earlier:
            return call
        inputs, earlier = replace(call.inputs, positions=position(call)), map(place, call.earlier)
        return replace(call, inputs=inputs, earlier=tuple(earlier))

    return _change_later_calls(evidence, PLACED, lambda x: replace(x, call=place(x.call)))


MOST_POSITIONS = 16


def _position_in_decoding(evidence: Evidence) -> Variants:
    shifts = (n for n in range(-MOST_POSITIONS, MOST_POSITIONS + 1) if n)
    for offset in (None, *shifts) if evidence.has_later_calls else ():
        model = _place_later_calls(evidence, partial(_shift_positions, offset))
        words = "from 0 again" if offset is None else offset
        yield Variant(model, {"offset": words}, "positions continue from the keys in the cache")


def _shift_positions(offset: int | None, call: RecordedCall) -> Tensor:
    return call.query_positions + (-call.past_key_count if offset is None else offset)


def _window_in_decoding(evidence: Evidence) -> Variants:
    left, right = evidence.model.settings.sides or (None, None)
    for other in (None, *range(MOST_KEYS)) if evidence.has_later_calls else ():
        if other != left:
            window = None if other is None else (other, right)
            changed = evidence.model.with_settings(window=window)
            model = _change_later_calls(evidence, SCORES, partial(replace, model=changed))
            repair = "no window" if left is None else f"window=({left}, 0) in every call"
            yield Variant(model, {"window": _count_window(other)}, repair)


MASKS: tuple[tuple[MaskChange, str], ...] = (
    (_ignore_mask, "mask ignored"),
    (_flip_keys, "mask at the other end"),
    (torch.logical_not, "mask inverted"),
)


def _padding_in_decoding(evidence: Evidence) -> Variants:
    if not evidence.has_later_calls:
        return
    for change, words in MASKS if evidence.has_masks else ():
        model = _change_later_calls(evidence, SCORES, partial(_change_mask, change))
        repair = 'Mask.lengths(..., side="left") in every call with the cache'
        yield Variant(model, {"padding": words}, repair)
    if any(call.inputs.positions is not None for call in evidence.calls):
        repair = "positions that count the tokens and not the padding, in every call"
        model = _place_later_calls(evidence, lambda _: None)
        yield Variant(model, {"padding": "counted in the positions"}, repair)


FIRST = (0, 1, 2, 4)  # keys at the start that a cache may keep as attention sinks


@dataclass(frozen=True)
class Eviction:
    """The keys that are left of those of earlier calls."""

    first: int = 0  # number of keys of the start that stay
    last: int = 0  # likewise, of the end
    missing: int = 0  # number of keys of the start that do not stay; 0 to state ``last``
    holds_new: bool = False  # the new keys of a call, which always stay, are among the last ones

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


def _list_evictions(past: int) -> Iterator[Eviction]:
    for last in range(past):
        yield Eviction(missing=last + 1)
        for first in FIRST:
            yield Eviction(first, last)
            yield Eviction(first, last, holds_new=True)


def _evicted_keys(evidence: Evidence) -> Variants:
    later = next((call for call in evidence.calls if call.earlier), None)
    if later is None:
        return
    every = later.key_positions.shape[1]
    recorded = (later.stages[stage] for stage in ("scores", "weights") if stage in later.stages)
    columns = next((x.shape[-1] for x in recorded), every)
    if evidence.model.predict_stage("scores", later).shape[-1] != every:
        return  # keys are dropped already
    for eviction in _list_evictions(max(call.past_key_count for call in evidence.calls)):
        if columns == every:
            model = evidence.replace_stages(SCORES, _hide_evicted_keys, eviction)
        elif len(eviction.remaining_keys(later)) == columns:
            model = evidence.replace_stages(
                SCORES, lambda kept, x: x.usual_result()[..., kept.remaining_keys(x.call)], eviction
            )
            mix = partial(_mix_remaining_values, eviction)
            model = model.with_stage_function("head outputs", mix)
        else:
            continue
        repair = "a cache that holds every token of the sequence"
        yield Variant(model, eviction.parameters, repair)


def _hide_evicted_keys(eviction: Eviction, forced: ForcedStage) -> Tensor:
    scores = forced.usual_result()
    is_left = torch.zeros(scores.shape[-1], dtype=torch.bool)
    is_left[eviction.remaining_keys(forced.call)] = True
    return scores.masked_fill(~is_left, -torch.inf)


def _mix_remaining_values(eviction: Eviction, forced: ForcedStage) -> Tensor:
    values = forced.of_all_calls("v")[:, :, eviction.remaining_keys(forced.call)]
    return forced["weights"] @ repeat_kv_heads(values, heads=forced["weights"].shape[1])
