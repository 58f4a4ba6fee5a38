"""A window holds another number of keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant

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
        """Return windows of up to MOST keys before a query, and none."""
        settings = evidence.model.settings
        if settings.window is None and not settings.causal:
            return
        left, right = (None, None) if settings.window is None else settings.window
        repair = f"window=({left}, {0 if settings.causal else right})"
        for other in (*range(MOST), None):
            if other != left:
                far = other if right is not None and right == left else right
                model = evidence.model.with_settings(window=(other, far))
                keys = "all" if other is None else other + 1
                yield Variant(model, {"window": keys}, repair)
