"""Causes in calls with earlier keys: their positions, windows, padding and missing keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.causes.masks import MaskChange, change_mask, has_masks
from headwise.diagnosis.simulation.model import AttentionModel, ForcedStage
from headwise.diagnosis.simulation.stages import RecordedCall
from headwise.function.stages import repeat_kv_heads


def has_later_calls(evidence: Evidence) -> bool:
    """True if a call has keys of earlier calls."""
    return any(call.earlier for call in evidence.calls)


def change_model_in_later_calls(
    evidence: Evidence, stages: Sequence[str], change: Callable[[ForcedStage], ForcedStage]
) -> AttentionModel:
    """Return the model with stages that are changed in calls with earlier keys."""
    model = evidence.model
    for stage in stages:
        model = model.with_stage_function(stage, partial(_stage_result_in_later_calls, change))
    return model


def _stage_result_in_later_calls(
    change: Callable[[ForcedStage], ForcedStage], forced: ForcedStage
) -> Tensor:
    return change(forced).usual_result() if forced.call.earlier else forced.usual_result()


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


class DecodingPositionOffsetCause(Cause):
    """Calls with earlier keys count their positions from another number.

    A call of 1 token after n earlier ones is at position n. Code that makes positions of the length
    of the call rotates it as if it were at position 0. Later keys are then stored at wrong
    positions as well.

    Wrong:
        positions = torch.arange(tokens)

    Right:
        positions = torch.arange(tokens) + past_length

    Repair:
        Continue the positions from the keys in the cache, without counting padding.

    Confused with:
        rotary position offset: if the first call is off by the same number.
        left padding in decoding: both part in later calls alone; the second of them needs padding.
    """

    name: ClassVar[str] = "position offset in decoding"
    symptom: ClassVar[str] = (
        "Prefill is right, and every token generated with a key/value cache is wrong"
    )
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary", "scores")
    cost: ClassVar[float] = 0.7

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return offsets in calls with earlier keys, and positions that start at 0 again."""
        if not has_later_calls(evidence):
            return
        offsets: list[int | None] = [
            None,
            *(n for n in range(-MOST_POSITIONS, MOST_POSITIONS + 1) if n),
        ]
        for offset in offsets:
            model = change_model_in_later_calls(
                evidence, self.stages, partial(_shift_positions, offset)
            )
            words = "from 0 again" if offset is None else offset
            yield Variant(model, {"offset": words}, "positions continue from the keys in the cache")


def _shift_positions(offset: int | None, forced: ForcedStage) -> ForcedStage:
    def positions(call: RecordedCall) -> Tensor:
        return call.query_positions + (-call.past_key_count if offset is None else offset)

    return replace(forced, call=change_call_positions(forced.call, positions))


MOST_KEYS = 40


class DecodingWindowCause(Cause):
    """The window of calls with a cache holds another number of keys.

    A cache that drops keys for the window, and a mask that hides them, must agree. Off by one, the
    query itself is counted in one of the two alone.

    Repair:
        Give calls with a cache the window of the first call: `window=(left, 0)` hides all but
        `left` earlier keys.

    Confused with:
        window off by one: if the first call has the wrong window as well.
        evicted keys: for one step after the first keys left the cache.
    """

    name: ClassVar[str] = "window in decoding"
    symptom: ClassVar[str] = (
        "A sliding window is right in prefill, and generation attends too far or not far enough"
    )
    stages: ClassVar[tuple[str, ...]] = ("scores",)
    cost: ClassVar[float] = 0.7

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return windows that differ in calls with earlier keys alone."""
        settings = evidence.model.settings
        if not has_later_calls(evidence):
            return
        left, right = (None, None) if settings.sides is None else settings.sides
        for other in (None, *range(MOST_KEYS)):
            if other != left:
                changed = evidence.model.with_settings(
                    window=None if other is None else (other, right)
                )
                model = change_model_in_later_calls(
                    evidence, self.stages, partial(_replace_model_of_stage, changed)
                )
                keys = "all" if other is None else other + 1
                repair = "no window" if left is None else f"window=({left}, 0) in every call"
                yield Variant(model, {"window": keys}, repair)


def _replace_model_of_stage(model: AttentionModel, forced: ForcedStage) -> ForcedStage:
    return replace(forced, model=model)


MASKS: tuple[tuple[MaskChange, str], ...] = (
    (lambda _: None, "mask ignored"),
    (lambda mask: mask.flip(-1), "mask at the other end"),
    (torch.logical_not, "mask inverted"),
)
REPAIR = 'Mask.lengths(..., side="left") in every call with the cache'


class DecodingLeftPaddingCause(Cause):
    """Calls with a cache attend to padding before the tokens, or count it among their positions.

    The first call has the mask and the positions of the prompts. Each later call has one new token,
    and needs the mask of all keys: that of the prompts and a column for every new token. Its
    position is the number of tokens before it, without the padding.

    Wrong:
        layer(token, cache=cache)

    Right:
        layer(token, cache=cache, mask=Mask.lengths(keys=lengths, side="left"))

    Repair:
        Pass the whole mask in every call: `Mask.lengths(..., side="left")`, or an `attention_mask`
        that grows by a column for each token. Positions are `attention_mask.cumsum(-1) - 1`.

    Confused with:
        padding ignored: if the first call ignores the mask as well.
        position offset in decoding: if all prompts have the same number of padding tokens.
    """

    name: ClassVar[str] = "left padding in decoding"
    symptom: ClassVar[str] = (
        "Batched generation with left padding gives other text than each prompt alone"
    )
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary", "scores")
    cost: ClassVar[float] = 0.7

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return calls with earlier keys that do not use the mask, or positions, of the caller."""
        if not has_later_calls(evidence):
            return
        masks = MASKS if has_masks(evidence) else ()
        for change, words in masks:
            model = change_model_in_later_calls(evidence, ("scores",), partial(change_mask, change))
            yield Variant(model, {"padding": words}, REPAIR)
        if any(call.inputs.positions is not None for call in evidence.calls):
            repair = "positions that count the tokens and not the padding, in every call"
            model = change_model_in_later_calls(
                evidence, self.stages, _set_positions_by_cache_length
            )
            yield Variant(model, {"padding": "counted in the positions"}, repair)


def _set_positions_by_cache_length(forced: ForcedStage) -> ForcedStage:
    """Return the stage with positions that count all keys of the cache."""
    return replace(forced, call=change_call_positions(forced.call, lambda _: None))


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


class EvictedKeysCause(Cause):
    """The first keys of the cache are missing.

    A cache of fixed size drops keys when it is full: the first ones, or all but some of the first
    and the last ones. Models without a window need all of them.

    Repair:
        Make the cache as long as the sequence, such as `max_cache_len` of a static cache in
        transformers.

    Confused with:
        window in decoding: as long as only a few keys were dropped.
    """

    name: ClassVar[str] = "evicted keys"
    symptom: ClassVar[str] = (
        "Long generation forgets its first tokens: the key/value cache is too short"
    )
    stages: ClassVar[tuple[str, ...]] = ("scores", "head outputs")
    cost: ClassVar[float] = 0.75

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return calls without some of their first keys, hidden or dropped."""
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
