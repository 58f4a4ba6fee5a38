"""The first keys of the cache are missing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.simulation.attention_model import Forced


class EvictedKeysCause(Cause):
    """The first keys of the cache are missing.

    A cache of fixed size drops the first keys when it is full. Models without a window need all of
    them.

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
        """Return calls without their first keys, hidden or dropped."""
        most = max((call.past for call in evidence.calls), default=0)
        for count in range(1, most + 1):
            hidden = evidence.model.with_stage("scores", partial(_hidden, count))
            yield Variant(hidden, {"keys": count}, "a cache that holds every token of the sequence")


def _hidden(count: int, forced: Forced) -> Tensor:
    scores = forced.usual().clone()
    if forced.call.earlier:
        scores[..., :count] = -torch.inf
    return scores
