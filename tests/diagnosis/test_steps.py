"""Functions whose keys and values stay between calls, as subjects of a comparison."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headwise import Attention, Rotary, compare
from headwise.diagnosis.simulation.model import Inputs
from headwise.errors import OptionError
from headwise.identify import Diagnosis, Verdict
from tests.diagnosis.among import compare_among
from tests.quick import others_extra

WIDTH, HEADS, KV_HEADS, HEAD_DIM, WINDOW = 40, 4, 2, 6, 4
State = tuple[Tensor, Tensor, int]


def layer_of(window: int | None = WINDOW) -> Attention:
    torch.manual_seed(0)
    sides = (None if window is None else window - 1, 0)
    counts = {"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    return Attention(WIDTH, HEADS, **counts, window=sides, rotary=Rotary(theta=300.0))


class Port:
    """The layer as people write it for decoding; its faults are methods of subclasses."""

    def __init__(self, layer: Attention, window: int | None = WINDOW) -> None:
        self.layer, self.window = layer, window

    def start(self, batch: int) -> State:
        empty = torch.zeros(batch, KV_HEADS, 0, HEAD_DIM)
        return empty, empty, 0

    def positions(self, past: int, new: int, held: int) -> Tensor:
        del held
        return torch.arange(past, past + new)

    def keep(self, x: Tensor, new: int) -> Tensor:
        del new
        return x if self.window is None else x[:, :, -(self.window - 1) :]

    def seen(self, queries: Tensor, keys: Tensor) -> Tensor:
        back = queries[..., None] - keys[..., None, :]
        return (back >= 0) if self.window is None else (back >= 0) & (back < self.window)

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        exponents = torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM
        angles = positions[:, None].double() * 300.0**-exponents
        cos, sin = (each.repeat(1, 2).to(x.dtype) for each in (angles.cos(), angles.sin()))
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    def step(self, x: Tensor, state: State, mask: Tensor | None = None) -> tuple[Tensor, State]:
        keys, values, past = state
        new, layer = x.shape[1], self.layer
        q, k, v = (
            part(x).unflatten(2, (-1, HEAD_DIM)).transpose(1, 2)
            for part in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        positions = self.positions(past, new, keys.shape[2])
        q, k = self.turn(q, positions), self.turn(k, positions)
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        places = torch.arange(past, past + new)
        seen = self.seen(places, torch.arange(keys.shape[2]) + past + new - keys.shape[2])
        if mask is not None:
            seen = seen & mask[..., -keys.shape[2] :]
        groups = HEADS // KV_HEADS
        scores = q @ keys.repeat_interleave(groups, 1).mT * HEAD_DIM**-0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        mixed = (weights @ values.repeat_interleave(groups, 1)).transpose(1, 2).flatten(2)
        state = self.keep(keys, new), self.keep(values, new), past + new
        return layer.out_proj(mixed), state


class WithoutMask(Port):
    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:  # type: ignore[override]
        return super().step(x, state)


def test_a_right_port_is_the_same_function_in_every_way_of_calling() -> None:
    layer = layer_of()
    diagnosis = compare(Port(layer), layer)
    assert diagnosis.verdict is Verdict.TO_ROUNDING
    assert diagnosis.function is not None
    assert diagnosis.function.ways == (
        "in one call: equal; in calls of 5, 1, 3, 1 tokens: equal; in calls of 1 token: equal; "
        "in calls of 5, 1, 3, 1 tokens, under a mask: equal",
    )


TRIED = (
    "position offset in decoding",
    "left padding in decoding",
    "window in decoding",
    "evicted keys",
    "rotary applied twice",
    "rotary missing",
    "rotary scaling kind",
    "causal alignment",
    "causal mask missing",
    "window off by one",
    "padding ignored",
)


class RestartsPositions(WithoutMask):
    def positions(self, past: int, new: int, held: int) -> Tensor:
        return torch.arange(new)


class CountsHeldKeys(WithoutMask):
    def positions(self, past: int, new: int, held: int) -> Tensor:
        return torch.arange(held, held + new)


class IsOneTooFar(WithoutMask):
    def positions(self, past: int, new: int, held: int) -> Tensor:
        return torch.arange(past, past + new) + (past > 0)


class TurnsKeysAgain(WithoutMask):
    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        turned = super().turn(x, positions)
        return super().turn(turned, positions) if x.shape[1] == KV_HEADS else turned


class KeepsOneKeyLess(WithoutMask):
    def keep(self, x: Tensor, new: int) -> Tensor:
        return x[:, :, -(WINDOW - 2) :]


class KeepsTheLastCall(WithoutMask):
    def keep(self, x: Tensor, new: int) -> Tensor:
        return super().keep(x[:, :, -new:], new)


class KeepsNothing(WithoutMask):
    def keep(self, x: Tensor, new: int) -> Tensor:
        return x[:, :, :0]


class AlignsToTheFirstKey(WithoutMask):
    def seen(self, queries: Tensor, keys: Tensor) -> Tensor:
        back = torch.arange(len(queries))[:, None] - torch.arange(len(keys))
        return (back >= 0) & (back < WINDOW)


class AlignsToTheFirstKeyOfAWindow(AlignsToTheFirstKey):
    def keep(self, x: Tensor, new: int) -> Tensor:
        return x[:, :, -WINDOW:]


class AlignsOnlySeveralTokens(AlignsToTheFirstKey):
    def seen(self, queries: Tensor, keys: Tensor) -> Tensor:
        return super().seen(queries, keys) if len(queries) > 1 else Port.seen(self, queries, keys)


class TurnsTheCacheInEachCall(WithoutMask):
    """Keys are stored as they were read, turned by all calls since theirs."""

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:  # type: ignore[override]
        held = state[0].shape[2]
        places = torch.arange(state[2] - held, state[2])
        return super().step(x, (self.turn(state[0], places), *state[1:]))


class CountsTheCacheTwice(WithoutMask):
    def positions(self, past: int, new: int, held: int) -> Tensor:
        return torch.arange(past, past + new) + past


class StoresKeysBeforeTheyTurn(WithoutMask):
    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:  # type: ignore[override]
        output, (_, values, past) = super().step(x, state)
        k = self.layer.k_proj(x).unflatten(2, (-1, HEAD_DIM)).transpose(1, 2)
        return output, (self.keep(torch.cat([state[0], k], 2), x.shape[1]), values, past)


class HidesNoLaterKey(WithoutMask):
    def seen(self, queries: Tensor, keys: Tensor) -> Tensor:
        back = queries[:, None] - keys
        return ((back >= 0) | bool(queries[0])) & (back < WINDOW)


class WindowOfTheCacheAlone(WithoutMask):
    def seen(self, queries: Tensor, keys: Tensor) -> Tensor:
        return queries[:, None] >= keys


FAULTS: tuple[tuple[type[Port], str, dict[str, Any]], ...] = (
    (RestartsPositions, "position offset in decoding", {"offset": "from 0 again"}),
    (KeepsOneKeyLess, "evicted keys", {"kept": 2}),
    (AlignsToTheFirstKey, "causal alignment", {"align": "top-left"}),
    (TurnsKeysAgain, "rotary applied twice", {"turned": "k"}),
    (CountsHeldKeys, "position offset in decoding", {"offset": "from the 3 keys that are kept"}),
    (IsOneTooFar, "position offset in decoding", {"offset": 1}),
    (KeepsTheLastCall, "evicted keys", {"kept": "those of the last call"}),
    (KeepsNothing, "evicted keys", {"kept": 0}),
    (AlignsOnlySeveralTokens, "causal alignment", {"align": "top-left"}),
    (
        TurnsTheCacheInEachCall,
        "rotary applied twice",
        {"turned": "cached keys, once more in each call"},
    ),
    (AlignsToTheFirstKeyOfAWindow, "causal alignment", {"align": "top-left"}),
    (
        CountsTheCacheTwice,
        "position offset in decoding",
        {"offset": "from twice the keys in the cache"},
    ),
    (StoresKeysBeforeTheyTurn, "rotary missing", {"of": "cached keys"}),
    (HidesNoLaterKey, "causal mask missing", {"calls": "with a cache"}),
    (WindowOfTheCacheAlone, "window off by one", {"window": "all keys of the cache and the call"}),
)
# Ports whose cause `make check` tries by another port.
FURTHER = (KeepsTheLastCall, KeepsNothing, AlignsToTheFirstKeyOfAWindow, IsOneTooFar)


@pytest.mark.parametrize(
    ("port", "name", "parameters"),
    others_extra(FAULTS, *(fault for fault in FAULTS if fault[0] not in FURTHER)),
)
def test_a_fault_of_calls_with_a_cache(
    port: type[Port], name: str, parameters: dict[str, Any]
) -> None:
    layer = layer_of()
    diagnosis = compare_among(TRIED, port(layer), layer)
    assert diagnosis.function is not None
    [cause] = diagnosis.function.causes
    assert (cause.name, dict(cause.parameters)) == (name, parameters)


class IgnoresTheMaskLater(Port):
    def step(self, x: Tensor, state: State, mask: Tensor | None = None) -> tuple[Tensor, State]:
        return super().step(x, state, None if state[2] else mask)


@pytest.mark.slow
def test_left_padding_that_later_calls_ignore() -> None:
    layer = layer_of(None)
    diagnosis = compare_among(TRIED, IgnoresTheMaskLater(layer, None), layer)
    assert diagnosis.function is not None
    [cause] = diagnosis.function.causes
    assert cause.name == "left padding in decoding"
    assert "in calls of 5, 1, 3, 1 tokens: equal" in diagnosis.function.ways[0]


def in_one_call(x: Tensor, layer: Attention) -> Tensor:
    return Port(layer).step(x, Port(layer).start(len(x)))[0]


@pytest.mark.slow
def test_one_call_and_calls_with_a_cache_of_one_function_are_compared() -> None:
    layer = layer_of()

    class Both(RestartsPositions):
        def __call__(self, x: Tensor) -> Tensor:
            return in_one_call(x, layer)

    diagnosis = compare_among(TRIED, Both(layer), layer)
    assert diagnosis.function is not None
    first, second = diagnosis.function.ways
    assert "in one call: equal; in calls of 5, 1, 3, 1 tokens: different from token 5 on" in first
    assert "the first beside itself" in second
    assert "apart by" in second


def with_cache(layer: Attention, port: type[Port]) -> Callable[..., Any]:
    """Return a function that returns the keys and values for the next call."""
    made = port(layer)

    def call(x: Tensor, past: State | None = None, use_cache: bool = False) -> Any:
        output, state = made.step(x, made.start(len(x)) if past is None else past)
        return (output, state) if use_cache else output

    return call


@pytest.mark.slow
def test_a_function_with_an_argument_for_the_state() -> None:
    layer = layer_of()
    assert compare(with_cache(layer, Port), layer).verdict is Verdict.TO_ROUNDING
    diagnosis = compare_among(TRIED, with_cache(layer, KeepsNothing), layer)
    assert names_of(diagnosis) == ["evicted keys"]


@pytest.mark.slow
def test_a_state_that_is_changed_in_place() -> None:
    layer = layer_of()

    class InPlace(WithoutMask):
        def start(self, batch: int) -> Any:
            return [super().start(batch)]

        def step(self, x: Tensor, state: Any) -> Any:
            output, state[0] = super().step(x, state[0])
            return output

    assert compare(InPlace(layer), layer).verdict is Verdict.TO_ROUNDING


@pytest.mark.slow
def test_a_port_in_numpy() -> None:
    layer = layer_of()

    class InNumpy(RestartsPositions):
        def step(self, x: Any, state: State) -> Any:
            if not isinstance(x, np.ndarray):
                raise TypeError("an array is needed")
            with torch.no_grad():
                output, state = super().step(torch.from_numpy(x), state)
            return output.numpy(), state

    assert names_of(compare_among(TRIED, InNumpy(layer), layer)) == ["position offset in decoding"]


@pytest.mark.slow
def test_inputs_on_which_a_port_fails_are_left_out() -> None:
    layer = layer_of()

    class OneTokenLater(WithoutMask):
        def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
            if state[2] and x.shape[1] > 1:
                raise ValueError("one token at a time")
            return super().step(x, state)

    diagnosis = compare(OneTokenLater(layer), layer)
    assert diagnosis.verdict is Verdict.TO_ROUNDING
    assert diagnosis.function is not None
    assert diagnosis.function.ways == ("in one call: equal; in calls of 1 token: equal",)
    assert any("one token at a time" in each for each in diagnosis.function.unprobed)


def test_a_function_that_returns_no_state_is_compared_in_one_call() -> None:
    layer = layer_of()

    def call(x: Tensor, cache: Any = None) -> Tensor:
        del cache
        return in_one_call(x, layer)

    diagnosis = compare(call, layer)
    assert diagnosis.verdict is Verdict.TO_ROUNDING
    assert diagnosis.function is not None
    assert diagnosis.function.ways == ()
    assert any("returns no cache" in each for each in diagnosis.function.unprobed)


def test_steps_of_the_caller_for_a_function_without_a_state_are_refused() -> None:
    layer = layer_of()
    with pytest.raises(OptionError, match="inputs with steps"):
        compare(
            lambda x: in_one_call(x, layer), layer, Inputs(torch.ones(1, 3, WIDTH), steps=(2, 1))
        )


def names_of(diagnosis: Diagnosis) -> list[str]:
    assert diagnosis.function is not None
    return diagnosis.function.cause_names
