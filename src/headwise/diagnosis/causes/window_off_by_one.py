"""A window holds another number of keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.simulation.attention_model import ForcedStage, key_query_distances
from headwise.diagnosis.simulation.stages import RecordedCall

MOST = 40


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
        if settings.window is None and not settings.causal:
            yield from _variants_of_windowed_masks(evidence)
            return
        left, right = settings.window or (None, None)
        if right is not None:
            model = evidence.model.with_settings(window=None, causal=False)
            yield Variant(model, {"window": "none"}, f"window=({left}, {right})")
        repair = f"window=({left}, {0 if settings.causal else right})"
        near = [size + step for size in (left, right) if size for step in (-1, 1)]
        for length in dict.fromkeys(
            (None, *near, *range(MOST), *_largest_distances_before_and_after(evidence))
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
    for length in (None, *range(MOST)):
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
