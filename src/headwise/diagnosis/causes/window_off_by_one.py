"""A window holds another number of keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant

MOST = 40


class WindowOffByOneCause(Cause):
    """A window holds another number of keys."""

    name: ClassVar[str] = "window off by one"
    symptom: ClassVar[str] = "Long inputs differ a little from the original; short ones agree"
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
