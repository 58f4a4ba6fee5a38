"""Causes in masks: polarity, alignment, windows, padding and rows without keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.simulation.model import (
    AttentionModel,
    ForcedStage,
    compute_scores,
    key_query_distances,
)
from headwise.diagnosis.simulation.stages import RecordedCall

MOST_SHIFTS = 12


class CausalAlignmentCause(Cause):
    """The causal mask is shifted, or missing, or where it should not be.

    With as many queries as keys, query i attends to keys 0 to i. With a cache there are fewer
    queries than keys. The last query then stands at the last key. `is_causal=True` of
    `scaled_dot_product_attention` puts the first query at the first key instead, and flash-attn did
    so before version 2.1.

    Wrong:
        F.scaled_dot_product_attention(q, k, v, is_causal=True)  # 1 query, 8 keys: sees key 0 alone

    Right:
        seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    Repair:
        Pass `Mask.causal(align="bottom-right")` where a cache is in use. For a mask that is off by
        one, start `tril` or `triu` at the other diagonal.

    Confused with:
        window off by one: on inputs of fewer tokens than the window holds.
        mask polarity: if the caller's mask is the causal mask.
    """

    name: ClassVar[str] = "causal alignment"
    symptom: ClassVar[str] = (
        "Generation with a key/value cache sees only the first keys; a causal mask is off by one"
    )
    stages: ClassVar[tuple[str, ...]] = ("scores",)

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return causal masks shifted by up to MOST_SHIFTS keys, none, and top-left alignment."""
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
            if any(call.earlier for call in evidence.calls):
                model = free.with_stage_function("scores", _scores_with_top_left_mask)
                yield Variant(model, {"align": "top-left"}, 'Mask.causal(align="bottom-right")')


def _scores_with_top_left_mask(forced: ForcedStage) -> Tensor:
    """Return scores in which query i of the call attends to the first i + 1 keys of all."""
    scores = forced.usual_result()
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(~seen, -torch.inf)


MaskChange = Callable[[Tensor], Tensor | None]


def has_masks(evidence: Evidence) -> bool:
    """True if a call has a mask of the caller."""
    return any(call.inputs.mask is not None for call in evidence.calls)


def change_mask_of_model(evidence: Evidence, change: MaskChange) -> AttentionModel:
    """Return the model under a changed mask."""
    return evidence.model.with_stage_function("scores", partial(_scores_with_mask, change))


def _scores_with_mask(change: MaskChange, forced: ForcedStage) -> Tensor:
    return change_mask(change, forced).usual_result()


def change_mask(change: MaskChange, forced: ForcedStage) -> ForcedStage:
    """Return the stage under a changed mask."""
    inputs = forced.call.inputs
    if inputs.mask is None:
        return forced
    other = replace(inputs, mask=change(inputs.mask))
    return replace(forced, call=replace(forced.call, inputs=other))


class MaskAddedAsNumbersCause(Cause):
    """The mask is added to the scores as the numbers 0 and 1.

    A float mask is added to the scores. A mask of zeros and ones therefore raises some scores by 1.
    It must hold 0 where a query may attend and -inf where it may not.

    Wrong:
        scores = scores + mask.float()

    Right:
        scores = scores.masked_fill(~mask, -torch.inf)

    Repair:
        Pass the mask as bool, True where a query may attend.

    Confused with:
        padding ignored: if the mask has the same number for all keys of a row, which cancels in the
            softmax.
    """

    name: ClassVar[str] = "mask added as 0/1"
    symptom: ClassVar[str] = (
        "A mask changes the attention weights a little and hides nothing: it was added as 0 and 1"
    )
    stages: ClassVar[tuple[str, ...]] = ("scores",)

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return scores with the mask, or its inverse, added."""
        if any(call.inputs.mask is not None for call in evidence.calls):
            for is_inverted in (False, True):
                model = evidence.model.with_stage_function(
                    "scores", partial(_add_mask_as_numbers, is_inverted)
                )
                yield Variant(model, {}, "hide keys: scores.masked_fill(~mask, -inf)")


def _add_mask_as_numbers(is_inverted: bool, forced: ForcedStage) -> Tensor:
    inputs = forced.call.inputs
    mask = inputs.mask
    bare = replace(forced, call=replace(forced.call, inputs=replace(inputs, mask=None)))
    usual = compute_scores(bare)
    if mask is None:
        return usual
    return usual + (~mask if is_inverted else mask).to(usual.dtype)


# Numbers that hide a key when they are added to its score.
LOWEST = (-1e4, -1e9, torch.finfo(torch.float32).min)


class MaskPolarityCause(Cause):
    """True in the mask hides a key where it should show it.

    `scaled_dot_product_attention` and Hugging Face mean "may attend" by True or 1.
    `torch.nn.MultiheadAttention` means "hidden".

    Wrong:
        F.scaled_dot_product_attention(q, k, v, attn_mask=key_padding_mask[:, None, None])

    Right:
        F.scaled_dot_product_attention(q, k, v, attn_mask=~key_padding_mask[:, None, None])

    Repair:
        Pass `~mask`. In headwise, say which convention a mask has: `Mask.from_torch(mask)`, or
        `Mask.from_torch_padding(mask)`.

    Confused with:
        padding side: if half of each sequence is padding.
        causal alignment: if the caller's mask is the causal mask.
    """

    name: ClassVar[str] = "mask polarity"
    symptom: ClassVar[str] = (
        "The padding is attended to and the tokens are hidden: the attention mask is inverted"
    )
    stages: ClassVar[tuple[str, ...]] = ("scores",)

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the inverted mask of the caller, and large numbers added where it is True."""
        if has_masks(evidence):
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


class PaddingIgnoredCause(Cause):
    """The mask of the caller is not used.

    Repair:
        Pass the mask to every attention layer: `Mask.lengths(keys=lengths)`, or `attention_mask` in
        transformers.

    Confused with:
        left padding in decoding: if the first call has no padding.
    """

    name: ClassVar[str] = "padding ignored"
    symptom: ClassVar[str] = (
        "The result for a prompt depends on the other prompts of the batch: padding is not masked"
    )
    stages: ClassVar[tuple[str, ...]] = ("scores",)

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the model without the mask of the caller."""
        if has_masks(evidence):
            yield Variant(change_mask_of_model(evidence, lambda _: None), {}, "pass the mask on")


class PaddingSideCause(Cause):
    """The mask hides the other end of each sequence.

    Decoders are padded on the left, so that the last token is at the end. Encoders are padded on
    the right.

    Wrong:
        tokenizer.padding_side = "right"  # and a mask for the left

    Right:
        tokenizer.padding_side = "left"

    Repair:
        Pad and mask the same side: `Mask.lengths(keys=lengths, side="left")`.

    Confused with:
        mask polarity: if half of each sequence is padding.
        padding ignored: on a batch of equal lengths, which has no padding.
    """

    name: ClassVar[str] = "padding side"
    symptom: ClassVar[str] = (
        "Batches differ from single prompts: left padding and right padding are mixed up"
    )
    stages: ClassVar[tuple[str, ...]] = ("scores",)

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the mask with its keys in reverse order."""
        if has_masks(evidence):
            model = change_mask_of_model(evidence, lambda mask: mask.flip(-1))
            yield Variant(model, {}, 'Mask.lengths(..., side="left"), or side="right"')


class RowsWithoutKeysCause(Cause):
    """A row whose keys are all hidden has NaN, equal weights or zeros.

    A softmax over -inf alone is NaN. With a finite number in its place, such as -1e9, it is the
    mean of all hidden keys.

    Wrong:
        scores.softmax(-1)

    Right:
        scores.softmax(-1).nan_to_num(0.0)

    Repair:
        Give such rows zeros, or never read them.

    Confused with:
        padding ignored: equal weights look like attention without a mask if all scores are equal.
    """

    name: ClassVar[str] = "rows without keys"
    symptom: ClassVar[str] = "Outputs are NaN for padded rows: a query whose keys are all masked"
    stages: ClassVar[tuple[str, ...]] = ("weights",)

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return NaN, and equal weights over all keys."""
        if any(
            bool(_find_empty_rows(evidence.model.predict_stage("scores", call)).any())
            for call in evidence.calls
        ):
            for words, value in (("NaN", math.nan), ("equal weights", None), ("weights of 1", 1.0)):
                model = evidence.model.with_stage_function(
                    "weights", partial(_fill_empty_rows, value)
                )
                yield Variant(model, {"row": words}, "give such rows zeros")


def _find_empty_rows(scores: Tensor) -> Tensor:
    return (scores == -math.inf).all(-1, keepdim=True)


def _fill_empty_rows(value: float | None, forced: ForcedStage) -> Tensor:
    scores = forced["scores"]
    other = 1 / scores.shape[-1] if value is None else value
    return torch.where(_find_empty_rows(scores), other, forced.usual_result())


MOST_KEYS = 40


class WindowOffByOneCause(Cause):
    """A window holds another number of keys.

    A window of 4096 counts the query itself in Hugging Face's Mistral. flash-attn's
    `window_size=(4096, 0)` does not count it, and holds 4097 keys.

    Wrong:
        flash_attn_func(q, k, v, window_size=(config.sliding_window, 0))

    Right:
        flash_attn_func(q, k, v, window_size=(config.sliding_window - 1, 0))

    Repair:
        `window=(left, 0)` with the number that is reported, which does not count the query.

    Confused with:
        causal alignment: on inputs of fewer tokens than the window holds.
        window in decoding: if the first call is right.
    """

    name: ClassVar[str] = "window off by one"
    symptom: ClassVar[str] = (
        "A sliding window is off by one: long inputs differ a little, short ones agree"
    )
    stages: ClassVar[tuple[str, ...]] = ("scores",)

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return windows of up to MOST keys, and of the lengths that the recorded scores state.

        A window differs before a query, after it, or on both sides; or there is no bound at all.
        """
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
    inputs = replace(forced.call.inputs, mask=whole)
    return replace(forced, call=replace(forced.call, inputs=inputs)).usual_result()


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
