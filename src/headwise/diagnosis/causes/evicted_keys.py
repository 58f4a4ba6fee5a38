"""The first keys of the cache are missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.simulation.attention_model import ForcedStage
from headwise.diagnosis.simulation.stages import RecordedCall
from headwise.reference import repeat_kv_heads

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
