"""Keys that a cache has dropped before a later call."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headwise.diagnosis.causes.evidence import Evidence, Variant, Variants
from headwise.diagnosis.simulation.model import ForcedStage, RecordedCall
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
