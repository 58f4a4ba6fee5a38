"""Causes in what hides keys: masks, windows, padding, and caches that dropped keys."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from headwise.diagnosis.causes.evidence import Evidence, Family, Variant, Variants
from headwise.diagnosis.causes.heads import change_later_calls
from headwise.diagnosis.outputs.runs import Runs
from headwise.diagnosis.simulation.model import (
    AttentionModel,
    ForcedStage,
    Inputs,
    RecordedCall,
    key_query_distances,
    visible_keys,
)
from headwise.errors import OptionError
from headwise.function.distance import slopes_of
from headwise.function.stages import repeat_kv_heads
from headwise.identify.catalogue import SCORES

FIRST = (0, 1, 2, 4)  # keys at the start that a cache may keep as attention sinks


@dataclass(frozen=True)
class Eviction:
    """The keys that are left of those of earlier calls."""

    first: int = 0  # number of keys of the start that stay
    last: int = 0  # likewise, of the end
    missing: int = 0  # number of keys of the start that do not stay; 0 to state ``last``
    holds_new: bool = False  # the new keys of a call, which always stay, are among the last ones
    is_by_call: bool = False  # the keys of the call before this one stay, ``last`` at most

    def remaining_keys(self, call: RecordedCall) -> Tensor:
        """Return the numbers of the keys of a call."""
        count = call.key_positions.shape[1]
        if not call.earlier:
            return torch.arange(count)
        new, last = count - call.past_key_count, self.last
        if self.is_by_call:
            last = min(last, call.earlier[-1].inputs.x.shape[1])
        size = max(last, new) if self.holds_new else last + new
        start = min(self.missing, call.past_key_count) or max(count - size, 0)
        return torch.cat([torch.arange(min(self.first, start)), torch.arange(start, count)])

    @property
    def parameters(self) -> dict[str, Any]:
        """The numbers for a report."""
        if self.missing:
            return {"missing": self.missing}
        if self.is_by_call:
            return {"kept": "those of the last call"}
        return {"kept": self.last} | ({"first": self.first} if self.first else {})


def _list_evictions(past: int, left: int | None) -> Iterator[Eviction]:
    for last in range(past):
        yield Eviction(missing=last + 1)
        for first in FIRST:
            yield Eviction(first, last)
            yield Eviction(first, last, holds_new=True)
    yield Eviction(last=past if left is None else left, is_by_call=True)


def _evicted_keys(evidence: Evidence) -> Variants:
    later = next((call for call in evidence.calls if call.earlier), None)
    if later is None:
        return
    every = later.key_positions.shape[1]
    recorded = (later.stages[stage] for stage in ("scores", "weights") if stage in later.stages)
    columns = next((x.shape[-1] for x in recorded), every)
    if evidence.model.predict_stage("scores", later).shape[-1] != every:
        return  # keys are dropped already
    left, _ = evidence.model.settings.sides or (None, None)
    for eviction in _list_evictions(max(call.past_key_count for call in evidence.calls), left):
        if columns == every:
            model = evidence.replace_stages(SCORES, hide_evicted_keys, eviction)
        elif len(eviction.remaining_keys(later)) == columns:
            model = evidence.replace_stages(
                SCORES, lambda kept, x: x.usual_result()[..., kept.remaining_keys(x.call)], eviction
            )
            mix = partial(_mix_remaining_values, eviction)
            model = model.with_stage_function("head outputs", mix)
        else:
            continue
        repair = "a cache that holds every token of the sequence"
        repair = repair if left is None else f"a cache that holds the last {left} tokens at least"
        yield Variant(model, eviction.parameters, repair)


def hide_evicted_keys(eviction: Eviction, forced: ForcedStage) -> Tensor:
    """Return scores without the keys that a cache dropped."""
    scores = forced.usual_result()
    if scores.shape[-1] != forced.call.key_positions.shape[1]:  # some are dropped already
        return scores
    is_left = torch.zeros(scores.shape[-1], dtype=torch.bool)
    is_left[eviction.remaining_keys(forced.call)] = True
    return scores.masked_fill(~is_left, -torch.inf)


def _mix_remaining_values(eviction: Eviction, forced: ForcedStage) -> Tensor:
    values = forced.of_all_calls("v")[:, :, eviction.remaining_keys(forced.call)]
    return forced["weights"] @ repeat_kv_heads(values, heads=forced["weights"].shape[1])


MOST_SHIFTS = 12
MOST_KEPT = 1 << 30  # keys of a cache that drops none
CAUSAL = "a query attends to keys up to its own position"


def _is_causal(evidence: Evidence) -> bool:
    settings = evidence.model.settings
    return settings.causal or (settings.sides is not None and settings.sides[1] == 0)


def _longest(evidence: Evidence) -> int:
    return max(call.key_positions.shape[1] for call in evidence.calls)


def _causal_alignment(evidence: Evidence) -> Variants:
    left, right = evidence.model.settings.sides or (None, None)
    is_causal = _is_causal(evidence)
    repair = CAUSAL if is_causal else "no causal mask"
    most = min(MOST_SHIFTS, _longest(evidence) - 2)  # a larger shift hides no key
    for shift in range(-most, most + 1) if is_causal or right is None else ():
        if shift or not is_causal:
            model = evidence.model.with_settings(causal=False, window=(left, shift))
            parameters = {"shift": shift} if shift else {}
            variant = Variant(model, parameters, repair, is_unexpected=not is_causal)
            yield from _with_later_keys(evidence, variant)
    if is_causal and evidence.has_later_calls:
        free = evidence.model.with_settings(causal=False, window=(left, None))
        yield from _align_later_calls(free, left)


def _causal_mask_missing(evidence: Evidence) -> Variants:
    left, _ = evidence.model.settings.sides or (None, None)
    if _is_causal(evidence):
        free = evidence.model.with_settings(causal=False, window=(left, None))
        yield from _with_later_keys(evidence, Variant(free, {}, CAUSAL))
        if evidence.has_masks:
            model = evidence.replace_stages(
                SCORES,
                lambda x: (
                    x if x.call.inputs.mask is not None else replace(x, model=free)
                ).usual_result(),
            )
            yield Variant(model, {"where": "no mask is given"}, CAUSAL)
        if evidence.has_later_calls:
            repair = f"{CAUSAL}, also where a cache has some"
            for ignores_mask in (False, True) if evidence.has_masks else (False,):
                change = partial(_replace_model, free, ignores_mask)
                model = change_later_calls(evidence, SCORES, change)
                yield Variant(model, {"calls": "with a cache"}, repair)
    elif evidence.has_masks and not _has_padding(evidence):
        model = evidence.replace_stages(SCORES, lambda x: x.with_inputs(mask=None).usual_result())
        yield Variant(model, {}, "apply the causal mask of the call")


def _replace_model(model: AttentionModel, ignores_mask: bool, forced: ForcedStage) -> ForcedStage:
    return replace(forced.with_inputs(mask=None) if ignores_mask else forced, model=model)


def _has_padding(evidence: Evidence) -> bool:
    return any(not _is_causal_mask(call) for call in evidence.calls)


def _is_causal_mask(call: RecordedCall) -> bool:
    if (mask := call.inputs.mask) is None:
        return True
    mask, ahead = torch.broadcast_tensors(mask, key_query_distances(call))
    return call.inputs.source is None and torch.equal(mask, ahead <= 0)


def _causal_mask_inverted(evidence: Evidence) -> Variants:
    left, _ = evidence.model.settings.sides or (None, None)
    if not _is_causal(evidence):
        return
    for first in (0, 1):  # a query sees itself, or the next token first
        for last in dict.fromkeys((None, left)):
            model = evidence.model.with_settings(causal=False, window=(-first, last))
            parameters = {"sees": "itself and later keys" if not first else "later keys"}
            yield from _with_later_keys(evidence, Variant(model, parameters, CAUSAL))


def _with_later_keys(evidence: Evidence, variant: Variant) -> Variants:
    """Yield a variant that shows later keys, also with a bias that grows with their distance.

    Code for causal attention may add slope * position of the key: less than 0 for earlier keys,
    and more for later ones.
    """
    yield from _with_filled_rows(evidence, variant)
    if (slopes := slopes_of(evidence.model.settings)) is not None:
        by_distance = slopes[:, None, None]
        model = variant.model.with_slopes(None).with_stage_function(
            "scores", lambda x: x.usual_result() + by_distance * key_query_distances(x.call)
        )
        details = {"bias of later keys": "grows with the distance"}
        yield from _with_filled_rows(evidence, replace(variant, model=model, details=details))


def _with_filled_rows(evidence: Evidence, variant: Variant) -> Variants:
    """Yield a variant, and that of code which hides keys by a number where it hides them all."""
    yield variant
    if any(_empties_rows(variant.model, evidence.model, call) for call in evidence.calls):
        model = variant.model.with_stage_function("weights", partial(fill_empty_rows, None))
        yield replace(
            variant, model=model, details={**variant.details, "rows without keys": "equal weights"}
        )


def _empties_rows(changed: AttentionModel, model: AttentionModel, call: RecordedCall) -> bool:
    now = _find_empty_rows(changed.predict_stage("scores", call))
    if not bool(now.any()):
        return False
    return bool((now & ~_find_empty_rows(model.predict_stage("scores", call))).any())


def _align_later_calls(free: AttentionModel, left: int | None) -> Variants:
    """Yield other causal masks of calls with earlier keys; ``free`` is the model without one."""
    # Keys are those of all calls, or those that a window keeps, which may count from there too.
    bare, usual = free.with_settings(window=None), free.with_settings(window=(left, 0))
    held = [MOST_KEPT, *([] if left is None else [left, left + 1])]
    for kept in (Eviction(last=last) for last in held):
        for model, window in ((free, None), *([] if left is None else [(bare, left)])):
            for fewest in (1, 2):  # one token alone often has no mask
                function = partial(_scores_with_top_left_mask, usual, kept, window, fewest)
                changed = model.with_stage_function("scores", function)
                yield Variant(changed, {"align": "top-left"}, 'Mask.causal(align="bottom-right")')


def _scores_with_top_left_mask(
    usual: AttentionModel, kept: Eviction, window: int | None, fewest: int, forced: ForcedStage
) -> Tensor:
    """Return scores in which query i of the call attends to the first i + 1 keys of the cache.

    Calls of fewer than so many tokens see what they should.
    """
    if forced.call.inputs.x.shape[1] < fewest:
        return replace(forced, model=usual).usual_result()
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


def _count_keys(is_right: bool, mask: Tensor) -> Tensor:
    """Return the mask with as many keys in each row, behind which or before which padding is."""
    return mask.long().sort(-1, descending=is_right).values.bool()


def change_mask(change: MaskChange, forced: ForcedStage) -> ForcedStage:
    """Return the stage of a call with another mask, where it has one."""
    mask = forced.call.inputs.mask
    return forced if mask is None else forced.with_inputs(mask=change(mask))


def _vary_mask(evidence: Evidence, change: MaskChange, repair: str, **parameters: str) -> Variants:
    if evidence.has_masks:
        scores = evidence.replace_stages(SCORES, lambda x: change_mask(change, x).usual_result())
        yield from _with_filled_rows(evidence, Variant(scores, parameters, repair))


def _padding_ignored(evidence: Evidence) -> Variants:
    if not _has_padding(evidence):
        return iter(())
    return _vary_mask(evidence, ignore_mask, "pass the mask on")


def _padding_side(evidence: Evidence) -> Variants:
    repair = 'Mask.lengths(..., side="left"), or side="right"'
    yield from _vary_mask(evidence, flip_keys, repair)
    masks = [x for call in evidence.calls if (x := call.inputs.mask) is not None]
    for side, is_right in (("right", True), ("left", False)):
        count = partial(_count_keys, is_right)
        if any(not torch.equal(count(mask), mask) for mask in masks):
            yield from _vary_mask(evidence, count, repair, padding=f"always on the {side}")


def _mask_along_queries(evidence: Evidence) -> Variants:
    if evidence.has_masks:
        scores = evidence.replace_stages(SCORES, _scores_under_turned_mask)
        variant = Variant(scores, {}, "hide keys, not queries: mask[:, None, None, :]")
        yield from _with_filled_rows(evidence, variant)


def _scores_under_turned_mask(forced: ForcedStage) -> Tensor:
    mask, queries = forced.call.inputs.mask, forced.call.inputs.x.shape[1]
    if mask is None or mask.shape[-1] != queries:
        return forced.usual_result()
    return forced.with_inputs(mask=mask.mT).usual_result()


def _mask_after_softmax(evidence: Evidence) -> Variants:
    """Yield weights of which those of hidden keys are 0, so that a row is below 1, or -inf."""
    repair = "hide keys before the softmax: masked_fill(~mask, -inf)"
    for scope, number in product(_scopes(evidence), (0.0, -math.inf)):
        model = evidence.replace_stages(SCORES, _show_hidden, scope)
        model = model.with_stage_function("weights", partial(_drop_hidden, scope, number))
        details = {} if scope == "all" else {"of": scope}
        yield Variant(model, {"weight": number} if number else {}, repair, details)


def _show_hidden(scope: str, forced: ForcedStage) -> Tensor:
    usual = forced.usual_result()
    return torch.where(_find_hidden(scope, forced, usual), _score_all_keys(forced), usual)


def _drop_hidden(scope: str, number: float, forced: ForcedStage) -> Tensor:
    weights = forced.usual_result()
    if weights.shape[-1] != forced.call.key_positions.shape[1]:  # those of recorded other keys
        return weights
    return weights.masked_fill(_find_hidden(scope, forced, weights), number)


def _mask_added_as_numbers(evidence: Evidence) -> Variants:
    for is_inverted in (False, True) if evidence.has_masks else ():
        model = evidence.replace_stages(SCORES, _add_mask, 1.0, is_inverted)
        yield Variant(model, {}, "hide keys: scores.masked_fill(~mask, -inf)")
    if _is_causal(evidence) or evidence.model.settings.sides is not None:
        for is_inverted in (False, True):
            model = evidence.replace_stages(SCORES, _add_mask_of_settings, is_inverted)
            repair = "hide keys: scores.masked_fill(~mask, -inf)"
            yield Variant(model, {}, repair, {"of": "the settings alone"})


def _add_mask_of_settings(is_inverted: bool, forced: ForcedStage) -> Tensor:
    """Return scores of all keys, plus 1 at those that causality and a window leave."""
    seen = visible_keys(forced.with_inputs(mask=None)) ^ is_inverted
    free = forced.model.with_settings(causal=False, window=None)
    return replace(forced, model=free).usual_result() + seen.double()


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


def _finite_for_inf(evidence: Evidence) -> Variants:
    """Yield scores of hidden keys that are a number, or grow by one, which is fitted.

    A number that is as good as -inf shows in rows without keys alone.
    """
    repair = "hide keys: scores.masked_fill(~mask, -inf)"
    cap = evidence.model.settings.cap
    for scope in _scopes(evidence):
        for word in ("set to", "added"):

            def make(number: float, scope: str = scope, word: str = word) -> Variant:
                model = evidence.replace_stages(SCORES, _number_hidden, scope, number, word)
                number = 0.0 if abs(number) < LEAST else number
                value = f"{BELOW} or less" if number == LOWEST[0] else number
                parameters = {f"{word} hidden keys": value}
                return Variant(model, parameters, repair, {} if scope == "all" else {"of": scope})

            yield make(0.0)
            starts = NUMBERS if cap is None else (*NUMBERS, -cap)
            yield Family(make, starts, limit=LOWEST[0])
    scores = (evidence.model.predict_stage("scores", call) for call in evidence.calls)
    if any(bool(_find_empty_rows(each).any()) for each in scores):
        for number in LOWEST:
            model = evidence.replace_stages(("weights",), _weights_of_absorbed_scores, number)
            yield Variant(model, {"added hidden keys": number}, repair)


# From which the fit of a number starts: weights are powers of e, so that one far above is flat.
NUMBERS = (*map(float, range(-20, -12, 2)), *map(float, range(-12, 2)))
LEAST = 1e-6  # a smaller number is 0
BELOW = -22  # a number whose power no sum of weights shows


def _scopes(evidence: Evidence) -> list[str]:
    """Return whose hidden keys may have a number: the caller's mask, the settings, or both."""
    hides = _is_causal(evidence) or evidence.model.settings.sides is not None
    if not evidence.has_masks:
        return ["all"] if hides else []
    return ["all", "the mask alone", "the mask first", "the settings alone"] if hides else ["all"]


def _number_hidden(scope: str, number: float, word: str, forced: ForcedStage) -> Tensor:
    """Return scores with a number at hidden keys.

    Where that is the mask's alone, keys that the settings hide stay so, and where it is the mask's
    first, it is also what the mask hides beyond them.
    """
    usual, bare = forced.usual_result(), _score_all_keys(forced)
    chosen = _find_hidden(scope, forced, usual)
    return torch.where(chosen, number if word == "set to" else bare + number, usual)


def _find_hidden(scope: str, forced: ForcedStage, scores: Tensor) -> Tensor:
    mask = forced.call.inputs.mask
    by_mask = torch.zeros_like(scores, dtype=torch.bool) if mask is None else ~mask
    by_settings = ~visible_keys(forced.with_inputs(mask=None))
    return {
        "all": by_mask | by_settings,
        "the mask alone": by_mask & ~by_settings,
        "the mask first": by_mask,
        "the settings alone": by_settings & ~by_mask,
    }[scope]


def _score_all_keys(forced: ForcedStage) -> Tensor:
    model = forced.model.with_settings(causal=False, window=None)
    return replace(forced, model=model).with_inputs(mask=None).usual_result()


def _weights_of_absorbed_scores(number: float, forced: ForcedStage) -> Tensor:
    """Return weights of rows without keys when a large number was added to all their scores."""
    dtype = forced.call.dtype if forced.call.dtype != torch.float64 else torch.float32
    bare = _score_all_keys(replace(forced, stage="scores"))
    added = (bare.to(dtype) + torch.tensor(number, dtype=dtype)).softmax(-1).double()
    return torch.where(_find_empty_rows(forced["scores"]), added, forced.usual_result())


def _rows_without_keys(evidence: Evidence) -> Variants:
    scores = (evidence.model.predict_stage("scores", call) for call in evidence.calls)
    if any(bool(_find_empty_rows(each).any()) for each in scores):
        for words, value in (("NaN", math.nan), ("equal weights", None), ("weights of 1", 1.0)):
            model = evidence.replace_stages(("weights",), fill_empty_rows, value)
            yield Variant(model, {"row": words}, "give such rows zeros")


def _find_empty_rows(scores: Tensor) -> Tensor:
    return (scores == -math.inf).all(-1, keepdim=True)


def fill_empty_rows(value: float | None, forced: ForcedStage) -> Tensor:
    """Return the weights with a value in rows without keys; None for equal weights."""
    scores = forced["scores"]
    other = 1 / scores.shape[-1] if value is None else value
    return torch.where(_find_empty_rows(scores), other, forced.usual_result())


MOST_KEYS = 40


def count_window(length: int | None) -> int | str:
    """Return the number of keys in a window, the query's own included."""
    return "all" if length is None else length + 1


def _window_missing(evidence: Evidence) -> Variants:
    settings = evidence.model.settings
    left, right = settings.sides or (None, None)
    repair = f"window=({left}, {0 if settings.causal else right})"
    if left is not None:
        yield Variant(
            evidence.model.with_settings(window=(None, 0 if right == 0 else None)), {}, repair
        )
    if left is not None and right == 0:  # and no causal mask either
        yield Variant(evidence.model.with_settings(causal=False, window=None), {}, repair)
    if right:  # a window of later keys too: one bound of the two
        for side, window in (("before", (None, right)), ("after", (left, None))):
            if window != (left, right):
                yield Variant(evidence.model.with_settings(window=window), {"side": side}, repair)
    if (inferred := _infer_left_window_of_masks(evidence)) is not None:
        model = evidence.replace_stages(SCORES, _scores_with_window, None)
        yield Variant(model, {}, f"sliding_window={inferred + 1}")


def _window_side(evidence: Evidence) -> Variants:
    left, right = evidence.model.settings.sides or (None, None)
    if left is None or right != 0:
        return
    repair = f"window=({left}, 0): torch.ones(n, n).tril().triu(-{left})"
    for window, words in (((None, left), "all earlier, and next ones"), ((0, left), "next ones")):
        model = evidence.model.with_settings(causal=False, window=window)
        yield from _with_filled_rows(evidence, Variant(model, {"sees": words}, repair))
    bare = evidence.model.with_settings(causal=False, window=None)
    for edge in (left, left + 1, left + 2):
        for words in ("beyond the window", "beyond the window, and itself", "all but the next"):
            model = bare.with_stage_function(SCORES[0], partial(_hide_within, edge, words))
            variant = Variant(model, {"sees": words, "from": edge}, repair)
            yield from _with_filled_rows(evidence, variant)


def _hide_within(edge: int, words: str, forced: ForcedStage) -> Tensor:
    ahead = key_query_distances(forced.call)
    if words == "all but the next":
        seen = (ahead <= 0) | (ahead >= edge)
    else:
        seen = (ahead <= -edge) | ((ahead == 0) & words.endswith("itself"))
    return forced.usual_result().masked_fill(~seen, -torch.inf)


def _window_off_by_one(evidence: Evidence) -> Variants:
    settings = evidence.model.settings
    longest = _longest(evidence)
    if settings.sides is None and not settings.causal:
        seen = _read_windows(evidence)
        if seen and max(seen) < longest - 1:
            model = evidence.model.with_settings(window=seen)
            yield Variant(model, {"window": seen}, "no window", is_unexpected=True)
        left = _infer_left_window_of_masks(evidence)
        for length in range(min(MOST_KEYS, longest - 1)) if left is not None else ():
            if left is not None and length != left:
                model = evidence.replace_stages(SCORES, _scores_with_window, length)
                yield Variant(model, {"window": count_window(length)}, f"sliding_window={left + 1}")
        return
    left, right = settings.sides or (None, None)
    repair = f"window=({left}, {0 if settings.causal else right})"
    near = [size + step for size in (left, right) if size for step in (-1, 1)]
    if evidence.has_later_calls and left is not None:
        model = evidence.model.with_settings(window=(None, right))
        hide = partial(hide_evicted_keys, Eviction(last=left))
        model = model.with_stage_function("scores", hide)
        yield Variant(model, {"window": "all keys of the cache and the call"}, repair)
    recorded = (*_largest_distances_before_and_after(evidence), *_read_windows(evidence))
    for length in dict.fromkeys((*near, *range(MOST_KEYS), *recorded)):
        if length >= longest - 1:
            continue  # which hides no key
        if length != left:
            far = length if right is not None and right == left else right
            model = evidence.model.with_settings(window=(length, far))
            parameters = {"window": count_window(length)}
            yield Variant(model, parameters, repair, is_unexpected=left is None)
        if right and length != right:
            model = evidence.model.with_settings(window=(left, length))
            yield Variant(model, {"window after": count_window(length)}, repair)


def _read_windows(evidence: Evidence) -> tuple[int, ...]:
    runs = evidence.calls[0].runs
    calls = [call for call in evidence.calls if not call.earlier]
    single = [call.inputs for call in calls if call.inputs.source is None]
    if runs is None or not single:
        return ()
    x = max((inputs.x for inputs in single), key=lambda x: x.shape[1])
    try:
        seen: tuple[int, ...] = runs.remember(("windows", x.shape[1]), lambda: _see(runs, x))
    except OptionError:  # of a function that takes no such batch
        return ()
    return seen


def _see(runs: Runs, x: Tensor) -> tuple[int, ...]:
    """Return the last query that sees the first token, and how many before the last one see it."""
    moved = x[:1].repeat(3, 1, 1)
    moved[1, 0] *= -1
    moved[2, -1] *= -1
    output = runs.record(Inputs(moved)).stages["output"]
    least = runs.tolerance * output.abs().amax()
    first, last = ((each - output[0]).abs().amax(-1) > least for each in output[1:])
    first_seen, last_seen = (
        max(each.nonzero().flatten().tolist(), default=0) for each in (first, last.flip(0))
    )
    return first_seen, last_seen


def _infer_left_window_of_masks(evidence: Evidence) -> int | None:
    """Return the window of masks that hold one themselves, as those of transformers do."""
    if evidence.model.settings.sides is not None or evidence.model.settings.causal:
        return None
    lefts = [_infer_left_window_from_mask(call) for call in evidence.calls]
    return None if None in lefts else max(each for each in lefts if each is not None)


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
    ahead = key_query_distances(call)
    whole = (mask.any(-1, keepdim=True) & mask.any(-2, keepdim=True)).expand(mask.shape)
    is_causal = not bool((mask & (ahead > 0)).any())
    return whole & (ahead <= 0) if is_causal else whole


def _scores_with_window(length: int | None, forced: ForcedStage) -> Tensor:
    mask = forced.call.inputs.mask
    if mask is None:  # where the scores of hidden keys are asked for, too
        return forced.usual_result()
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
