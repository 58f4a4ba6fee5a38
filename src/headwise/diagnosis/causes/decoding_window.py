"""The window of calls with a cache holds another number of keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.causes.change_later_calls import (
    change_model_in_later_calls,
    has_later_calls,
)
from headwise.diagnosis.simulation.attention_model import AttentionModel, ForcedStage

MOST = 40


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
        left, right = (None, None) if settings.window is None else settings.window
        for other in (None, *range(MOST)):
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
