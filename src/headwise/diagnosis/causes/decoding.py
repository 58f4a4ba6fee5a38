"""Causes that show in calls with earlier keys alone.

Later calls have other positions, windows or padding, or read a cache that was filled wrongly.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from headwise.diagnosis.causes.evidence import Evidence, Variant, Variants
from headwise.diagnosis.causes.heads import change_later_calls
from headwise.diagnosis.causes.masks import (
    MOST_KEPT,
    MOST_KEYS,
    MaskChange,
    change_mask,
    count_window,
    flip_keys,
    ignore_mask,
)
from headwise.diagnosis.simulation.model import AttentionModel, ForcedStage, RecordedCall
from headwise.function.records import STAGES
from headwise.identify.catalogue import PLACED, ROTATED, SCORES

Start = Callable[[RecordedCall], int]  # the position of the first token of a call


def _place_later_calls(
    evidence: Evidence, start: Start | None, stages: Sequence[str] = PLACED
) -> AttentionModel:
    """Return the model whose later calls count from a start; None to count padding too."""

    def place(call: RecordedCall) -> RecordedCall:
        positions = call.inputs.positions
        if call.earlier:
            shift = None if start is None else start(call) - call.past_key_count
            positions = None if shift is None else call.query_positions + shift
        return replace(call, inputs=replace(call.inputs, positions=positions))

    return change_later_calls(evidence, stages, lambda x: replace(x, call=x.call.change(place)))


MOST_POSITIONS = 16
# What turns by other positions: all that depends on them, the rotation of both, or of one.
PARTS = (("", PLACED), ("", ROTATED), ("q", ROTATED[:1]), ("k", ROTATED[1:]))


def _position_in_decoding(evidence: Evidence) -> Variants:
    rotates = evidence.model.settings.rotation is not None
    parts = PARTS if rotates else PARTS[:1]
    starts = _list_starts(evidence) if evidence.has_later_calls else {}
    for words, start in starts.items():
        for roles, stages in parts:
            parameters = {"offset": words} | ({"roles": roles} if roles else {})
            model = _place_later_calls(evidence, start, stages)
            yield Variant(model, parameters, "positions continue from the keys in the cache")


def _list_starts(evidence: Evidence) -> dict[int | str, Start]:
    """Return numbers from which later calls may count their positions, by words or the offset."""
    starts: dict[int | str, Start] = {
        "from 0 again": lambda _: 0,
        "by the tokens of the call": lambda call: call.past_key_count + call.inputs.x.shape[1],
        "from twice the keys in the cache": lambda call: 2 * call.past_key_count,
    }
    left, _ = evidence.model.settings.sides or (None, None)
    for kept in () if left is None else (left, left + 1):
        starts[f"from the {kept} keys that are kept"] = partial(_start_behind, kept, 0)
    for offset in (n for n in range(-MOST_POSITIONS, MOST_POSITIONS + 1) if n):
        starts[offset] = partial(_start_behind, MOST_KEPT, offset)
    return starts


def _start_behind(kept: int, offset: int, call: RecordedCall) -> int:
    return min(kept, call.past_key_count) + offset


def _window_in_decoding(evidence: Evidence) -> Variants:
    left, right = evidence.model.settings.sides or (None, None)
    for other in (None, *range(MOST_KEYS)) if evidence.has_later_calls else ():
        if other != left:
            window = None if other is None else (other, right)
            changed = evidence.model.with_settings(window=window)
            model = change_later_calls(evidence, SCORES, partial(replace, model=changed))
            repair = "no window" if left is None else f"window=({left}, 0) in every call"
            yield Variant(model, {"window": count_window(other)}, repair)


MASKS: tuple[tuple[MaskChange, str], ...] = (
    (ignore_mask, "mask ignored"),
    (flip_keys, "mask at the other end"),
    (torch.logical_not, "mask inverted"),
)


def _padding_in_decoding(evidence: Evidence) -> Variants:
    if not evidence.has_later_calls:
        return
    for (change, words), most in product(MASKS if evidence.has_masks else (), (None, 1)):
        model = change_later_calls(evidence, SCORES, partial(change_mask, change), most)
        repair = 'Mask.lengths(..., side="left") in every call with the cache'
        details = {} if most is None else {"calls": "of one token"}
        yield Variant(model, {"padding": words}, repair, details)
    if any(call.inputs.positions is not None for call in evidence.calls):
        repair = "positions that count the tokens and not the padding, in every call"
        model = _place_later_calls(evidence, None)
        yield Variant(model, {"padding": "counted in the positions"}, repair)


Cached = Callable[[Tensor, ForcedStage], Tensor]  # (batch, kv_heads, keys, ...), where it is read


def read_other_cache(evidence: Evidence, role: str, change: Cached) -> AttentionModel:
    """Return the model that reads other keys or values in later calls."""
    stage = next(each for each in STAGES.values() if each.cached.startswith(role))

    def read(forced: ForcedStage) -> Tensor:
        call = forced.call
        if not call.earlier:
            return forced.usual_result()
        every = change(forced.of_all_calls(stage.cached), forced)
        parts = every.split([each.inputs.x.shape[1] for each in (*call.earlier, call)], 2)
        calls = zip((*call.earlier, call), parts, strict=True)
        *earlier, last = (each.with_stages({**each.stages, stage.cached: x}) for each, x in calls)
        return replace(forced, call=replace(last, earlier=tuple(earlier))).usual_result()

    return evidence.replace_stages((stage.name,), read)


def _cached_values_lost(evidence: Evidence) -> Variants:
    if evidence.has_later_calls:
        repair = "store the values of each call in the cache, beside its keys"
        yield Variant(read_other_cache(evidence, "v", _zero_earlier), {"values": 0.0}, repair)


def _zero_earlier(x: Tensor, forced: ForcedStage) -> Tensor:
    past = forced.call.past_key_count
    return torch.cat([torch.zeros_like(x[:, :, :past]), x[:, :, past:]], 2)


def _cache_joined_in_another_order(evidence: Evidence) -> Variants:
    left, _ = evidence.model.settings.sides or (None, None)
    places = [slice(None)]  # of the keys that stay between calls
    if left is not None:
        places += [slice(-left, None), slice(-left - 1, None), slice(left)]
    for held in places if evidence.has_later_calls else ():
        for roles in ("k", "v", "kv"):
            model = evidence.model
            for role in roles:
                seen = replace(evidence, model=model)
                model = read_other_cache(seen, role, partial(_join_in_front, held))
            repair = "torch.cat([cached, new], dim=-2): earlier tokens first, for keys and values"
            yield Variant(model, {"roles": roles, "first": "the new tokens"}, repair)


def _join_in_front(held: slice, x: Tensor, forced: ForcedStage) -> Tensor:
    """Return keys or values in the order of a cache that new ones are put in front of.

    It holds a part of them between calls, whatever they are. Others stay where they were, since
    the window hides them.
    """
    order: list[int] = []
    start = 0
    for each in (*forced.call.earlier, forced.call):
        end = start + each.inputs.x.shape[1]
        order = [*range(start, end), *order[held]]
        start = end
    return x[:, :, [*range(end - len(order)), *order]]
