"""Causes that show in calls with a cache alone."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from headwise.diagnosis.simulation.model import AttentionModel, ForcedStage, Inputs, RecordedCall
from tests.diagnosis.causes.faulty_models import (
    BATCH,
    TOKENS,
    inputs_of,
    model_of,
    recorded,
    searched,
)
from tests.quick import others_slow

DECODING = (
    "position offset in decoding",
    "left padding in decoding",
    "window in decoding",
    "evicted keys",
    "scale",
    "rotary missing",
    "causal alignment",
)
STEPS = (TOKENS - 5, 1, 1, 3)
PADDING = torch.tensor([0, 3, 6])  # tokens before each prompt


def decoded(
    model: AttentionModel, inputs: Inputs, change: Callable[[int, Inputs], Inputs]
) -> list[RecordedCall]:
    """Return calls that a layer makes of other arguments than the caller's."""
    calls: list[RecordedCall] = []
    believed: list[RecordedCall] = []
    for chunk in inputs.per_call:
        past = sum(each.inputs.x.shape[1] for each in calls)
        call = RecordedCall(change(past, chunk), {}, earlier=tuple(believed))
        stages = model.predict_all_stages(call)
        believed.append(call.with_stages(stages))
        calls.append(RecordedCall(chunk, stages, earlier=tuple(calls)))
    return calls


def padded() -> Inputs:
    """Return prompts with padding at their left, with masks and positions that know of it."""
    keys = torch.arange(TOKENS)
    mask = (keys >= PADDING[:, None])[:, None, None]
    positions = (keys - PADDING[:, None]).clamp(min=0)
    return inputs_of(mask=mask, positions=positions, steps=STEPS)


def moved_by(offset: int) -> Callable[[int, Inputs], Inputs]:
    """Return a change of the positions of calls with earlier keys."""

    def change(past: int, chunk: Inputs) -> Inputs:
        start = past + offset if past else 0
        positions = torch.arange(start, start + chunk.x.shape[1]).expand(BATCH, -1)
        return replace(chunk, positions=positions)

    return change


@pytest.mark.parametrize("offset", [-3, 2])
def test_a_position_offset_in_all_later_calls_is_one_cause(offset: int) -> None:
    model = model_of(causal=True)
    calls = decoded(model, inputs_of(steps=STEPS), moved_by(offset))
    result = searched(model, calls, *DECODING)
    assert [each.cause.name for each in result.causes] == ["position offset in decoding"]
    assert result.causes[0].variant.parameters == {"offset": offset}
    assert not result.left.cells_beyond_rounding


@pytest.mark.slow
def test_a_position_offset_beside_a_scale() -> None:
    model = model_of(causal=True)
    calls = decoded(model.with_settings(scale=0.5), inputs_of(steps=STEPS), moved_by(-2))
    result = searched(model, calls, *DECODING)
    assert {each.cause.name for each in result.causes} == {"position offset in decoding", "scale"}
    assert not result.left.cells_beyond_rounding


def counted(past: int, chunk: Inputs) -> Inputs:
    """Return positions that count the padding, in calls with earlier keys."""
    return replace(chunk, positions=None) if past else chunk


def bare(past: int, chunk: Inputs) -> Inputs:
    """Return no mask in calls with earlier keys."""
    return replace(chunk, mask=None) if past else chunk


def bare_of_one_token(past: int, chunk: Inputs) -> Inputs:
    return bare(past, chunk) if chunk.x.shape[1] == 1 else chunk


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (counted, "counted in the positions"),
        (bare, "mask ignored"),
        (bare_of_one_token, "mask ignored"),
    ],
)
def test_left_padding_that_later_calls_ignore(
    change: Callable[[int, Inputs], Inputs], words: str
) -> None:
    model = model_of(causal=True)
    result = searched(model, decoded(model, padded(), change), *DECODING)
    assert [each.cause.name for each in result.causes] == ["left padding in decoding"]
    assert result.causes[0].variant.parameters == {"padding": words}
    assert bool(result.causes[0].variant.details) == (change is bare_of_one_token)
    assert not result.left.cells_beyond_rounding


def test_a_scale_of_later_calls_alone() -> None:
    model = model_of(causal=True)
    other = model.with_settings(scale=0.2)
    calls: list[RecordedCall] = []
    for chunk in inputs_of(steps=STEPS).per_call:
        call = RecordedCall(chunk, {}, earlier=tuple(calls))
        calls.append(call.with_stages((other if calls else model).predict_all_stages(call)))
    [cause] = searched(model, calls, *DECODING).causes
    assert cause.cause.name == "scale"
    assert cause.variant.parameters == {"scale": pytest.approx(0.2), "calls": "with a cache"}


def test_right_calls_with_padding_agree() -> None:
    model = model_of(causal=True)
    assert not searched(model, recorded(model, padded()), *DECODING).left.cells_beyond_rounding
    assert not searched(model, recorded(model, padded()), *DECODING).causes


def test_padding_of_another_number_is_not_named() -> None:
    model = model_of(causal=True)

    def one_more(past: int, chunk: Inputs) -> Inputs:
        assert chunk.positions is not None
        shift = torch.tensor([0, 1, 2])[:, None]
        return replace(chunk, positions=chunk.positions + shift) if past else chunk

    result = searched(model, decoded(model, padded(), one_more), *DECODING)
    assert "left padding in decoding" not in [each.cause.name for each in result.causes]


def short_cache(model: AttentionModel, keep: Callable[[int, int], list[int]]) -> list[RecordedCall]:
    """Return calls of a cache that drops keys; ``keep`` takes the numbers of old and new keys."""

    def scores(forced: ForcedStage) -> Tensor:
        return forced.usual_result()[..., kept(forced)]

    def outputs(forced: ForcedStage) -> Tensor:
        values = forced.of_all_calls("v")[:, :, kept(forced)].repeat_interleave(2, 1)
        return forced["weights"] @ values

    def kept(forced: ForcedStage) -> list[int]:
        new = forced.call.inputs.x.shape[1]
        return keep(forced.call.past_key_count, new) if forced.call.earlier else list(range(new))

    faulty = model.with_stage_function("scores", scores).with_stage_function(
        "head outputs", outputs
    )
    return recorded(faulty, inputs_of(steps=STEPS))


def last_four(past: int, new: int) -> list[int]:
    return list(range(past - 4, past + new))


def capacity_of_five(past: int, new: int) -> list[int]:
    return list(range(past + new - 5, past + new))


def two_sinks(past: int, new: int) -> list[int]:
    return [0, 1, *last_four(past, new)]


def the_first(past: int, new: int) -> list[int]:
    return list(range(7, past + new))


@pytest.mark.parametrize(
    ("keep", "parameters"),
    [
        (last_four, {"kept": 4}),
        (capacity_of_five, {"kept": 5}),
        (two_sinks, {"kept": 4, "first": 2}),
        (the_first, {"missing": 7}),
    ],
)
def test_keys_that_a_cache_dropped(
    keep: Callable[[int, int], list[int]], parameters: dict[str, int]
) -> None:
    model = model_of(causal=True)
    result = searched(model, short_cache(model, keep), *DECODING)
    assert [each.cause.name for each in result.causes] == ["evicted keys"]
    assert result.causes[0].variant.parameters == parameters
    assert not result.left.cells_beyond_rounding


@pytest.mark.slow
def test_dropped_keys_beside_a_scale() -> None:
    model = model_of(causal=True)
    calls = short_cache(model.with_settings(scale=0.2), last_four)
    result = searched(model, calls, *DECODING)
    assert {each.cause.name for each in result.causes} == {"evicted keys", "scale"}
    assert not result.left.cells_beyond_rounding


def every_second(past: int, new: int) -> list[int]:
    return [*range(0, past, 2), *range(past, past + new)]


def one_inside(past: int, new: int) -> list[int]:
    return [place for place in range(past + new) if place != 3]


@pytest.mark.parametrize("keep", others_slow([every_second, one_inside]))
def test_other_missing_keys(keep: Callable[[int, int], list[int]]) -> None:
    model = model_of(causal=True)
    result = searched(model, short_cache(model, keep), *DECODING)
    assert not result.causes


CACHES = ("cached values lost", "cache joined in another order", *DECODING)


def from_cache(
    model: AttentionModel,
    read: Callable[[list[Tensor], int], list[Tensor]],
    *roles: str,
) -> list[RecordedCall]:
    """Return calls that read keys or values token by token, of which ``past`` are in the cache."""

    def other(role: str, forced: ForcedStage) -> Tensor:
        call = forced.call
        every = forced.of_all_calls(role)
        tokens = read([*every.unbind(2)], call.past_key_count)
        if role == "v":
            return forced["weights"] @ torch.stack(tokens, 2).repeat_interleave(2, 1)
        keys = torch.stack(tokens, 2).repeat_interleave(2, 1)
        products = forced["q after rotary"] @ keys.mT * forced.settings.factor
        return products.masked_fill(forced.usual_result().isinf(), -torch.inf)

    faulty = model
    for stage, role in (("scores", "k after rotary"), ("head outputs", "v")):
        if role[0] in roles:
            faulty = faulty.with_stage_function(stage, partial(other, role))
    return recorded(faulty, inputs_of(steps=STEPS))


def zeros_first(tokens: list[Tensor], past: int) -> list[Tensor]:
    return [0.0 * token if place < past else token for place, token in enumerate(tokens)]


def new_first(tokens: list[Tensor], past: int) -> list[Tensor]:
    """Return tokens in the order of the calls of `STEPS`, the last call first."""
    held: list[Tensor] = []
    start = 0
    for size in STEPS:
        if start + size <= len(tokens):
            held = tokens[start : start + size] + held
            start += size
    assert not past or len(held) == len(tokens)
    return held


def test_values_of_earlier_calls_that_are_zeros() -> None:
    model = model_of(causal=True)
    result = searched(model, from_cache(model, zeros_first, "v"), *CACHES)
    assert [each.cause.name for each in result.causes] == ["cached values lost"]
    assert not result.left.cells_beyond_rounding


@pytest.mark.parametrize("roles", ["k", "v", "kv"])
def test_new_tokens_in_front_of_the_cache(roles: str) -> None:
    model = model_of(causal=True)
    result = searched(model, from_cache(model, new_first, *roles), *CACHES)
    assert [each.cause.name for each in result.causes] == ["cache joined in another order"]
    assert result.causes[0].variant.parameters["roles"] == roles
    assert not result.left.cells_beyond_rounding


def halved(tokens: list[Tensor], past: int) -> list[Tensor]:
    return [0.5 * token if place < past else token for place, token in enumerate(tokens)]


def reversed_in_time(tokens: list[Tensor], past: int) -> list[Tensor]:
    return [*tokens[:past][::-1], *tokens[past:]]


@pytest.mark.parametrize("read", [halved, reversed_in_time])
def test_other_wrong_values_of_a_cache(read: Callable[[list[Tensor], int], list[Tensor]]) -> None:
    model = model_of(causal=True)
    assert not searched(model, from_cache(model, read, "v"), *CACHES).causes
