"""Score biases: every form against a loop over its definition, and what is refused."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headwise.errors import DeviceError, DTypeError, MaskError, OptionError
from headwise.masks.mask import Mask
from headwise.masks.score_bias import BoundBias, ScoreBias
from tests.refusals import refusals
from tests.strategies import score_biases

CPU = torch.device("cpu")
SHAPE = (3, 6, 24, 29)
Definition = Callable[[int, int, int, int], float]


def bind(bias: ScoreBias, shape: tuple[int, int, int, int] = SHAPE) -> BoundBias:
    batch, heads, queries, keys = shape
    return bias.bind(batch=batch, heads=heads, queries=queries, keys=keys, device=CPU)


def dense(bias: ScoreBias, shape: tuple[int, int, int, int] = SHAPE) -> Tensor:
    """A bias written down."""
    total = torch.zeros(shape, dtype=torch.float64)
    for part in bind(bias, shape).parts_at_rows(torch.arange(shape[2])):
        total = total + part
    return total


def brute(definition: Definition, shape: tuple[int, int, int, int] = SHAPE) -> Tensor:
    """The definition, pair by pair."""
    numbers = [float(definition(*index)) for index in itertools.product(*map(range, shape))]
    return torch.tensor(numbers, dtype=torch.float64).reshape(shape)


def normal(*sizes: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(*sizes, generator=generator, dtype=torch.float64)


SLOPES, TABLE, SHARED, WIDE = normal(6).abs(), normal(6, 7), normal(1, 7), normal(6, 201)
PAIRS, PER_HEAD, WHOLE, KEYS = normal(24, 29), normal(6, 24, 29), normal(*SHAPE), normal(3, 29)
OFFSET = 29 - 24  # the last query stands at the last key


def clipped(distance: int, reach: int) -> int:
    return max(-reach, min(reach, distance)) + reach


FORMS: dict[str, tuple[ScoreBias, Definition]] = {
    "nothing": (ScoreBias(), lambda b, h, i, j: 0.0),
    "alibi top-left": (
        ScoreBias.alibi(SLOPES, align="top-left"),
        lambda b, h, i, j: -SLOPES[h] * abs(j - i),
    ),
    "alibi bottom-right": (
        ScoreBias.alibi(SLOPES, align="bottom-right"),
        lambda b, h, i, j: -SLOPES[h] * abs(j - i - OFFSET),
    ),
    "relative top-left": (
        ScoreBias.relative(TABLE, align="top-left"),
        lambda b, h, i, j: TABLE[h, clipped(j - i, 3)],
    ),
    "relative bottom-right": (
        ScoreBias.relative(TABLE, align="bottom-right"),
        lambda b, h, i, j: TABLE[h, clipped(j - i - OFFSET, 3)],
    ),
    "relative for all heads": (
        ScoreBias.relative(SHARED, align="top-left"),
        lambda b, h, i, j: SHARED[0, clipped(j - i, 3)],
    ),
    "relative with a long reach": (
        ScoreBias.relative(WIDE, align="top-left"),
        lambda b, h, i, j: WIDE[h, j - i + 100],
    ),
    "queries keys": (
        ScoreBias.dense(PAIRS, axes="queries keys"),
        lambda b, h, i, j: PAIRS[i, j],
    ),
    "batch keys": (ScoreBias.dense(KEYS, axes="batch keys"), lambda b, h, i, j: KEYS[b, j]),
    "heads queries keys": (
        ScoreBias.dense(PER_HEAD, axes="heads queries keys"),
        lambda b, h, i, j: PER_HEAD[h, i, j],
    ),
    "all four axes": (
        ScoreBias.dense(WHOLE, axes="batch heads queries keys"),
        lambda b, h, i, j: WHOLE[b, h, i, j],
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_bias_is_its_definition(name: str) -> None:
    bias, definition = FORMS[name]
    torch.testing.assert_close(dense(bias), brute(definition))


@pytest.mark.parametrize("names", [*itertools.pairwise(FORMS)])
def test_a_sum_adds_up(names: tuple[str, str]) -> None:
    first, second = FORMS[names[0]][0], FORMS[names[1]][0]
    torch.testing.assert_close(dense(first + second), dense(first) + dense(second))


def test_alibi_by_hand() -> None:
    # Slope 1/2: half a point off for each position of distance.
    bias = ScoreBias.alibi(torch.tensor([0.5]))
    assert dense(bias, (1, 1, 3, 3))[0, 0].tolist() == [
        [0, -0.5, -1],
        [-0.5, 0, -0.5],
        [-1, -0.5, 0],
    ]
    cached = ScoreBias.alibi(torch.tensor([0.5]), align="bottom-right")
    assert dense(cached, (1, 1, 1, 3))[0, 0].tolist() == [[-1, -0.5, 0]]


def test_relative_by_hand() -> None:
    # Reach 1: what is before, at, and after the query's own position; the rest is clipped.
    bias = ScoreBias.relative(torch.tensor([[10.0, 20.0, 30.0]]))
    assert dense(bias, (1, 1, 3, 3))[0, 0].tolist() == [[20, 30, 30], [10, 20, 30], [10, 10, 20]]


def test_minus_infinity_is_kept() -> None:
    bias = ScoreBias.dense(torch.tensor([0.0, -math.inf]), axes="keys")
    assert dense(bias, (1, 1, 1, 2)).flatten().tolist() == [0, -math.inf]


@st.composite
def tiles(draw: st.DrawFn) -> tuple[ScoreBias, tuple[int, int, int, int], list[slice]]:
    shape = tuple(draw(st.integers(1, most)) for most in (3, 4, 17, 19))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    bias = score_biases(lambda options: draw(st.sampled_from(options)), shape, generator)
    parts = []
    for size in shape:
        first = draw(st.integers(0, size - 1))
        parts.append(slice(first, draw(st.integers(first + 1, size))))
    return bias or ScoreBias(), shape, parts


@given(tiles())
def test_parts_are_a_tile_of_the_bias(
    drawn: tuple[ScoreBias, tuple[int, int, int, int], list[slice]],
) -> None:
    bias, shape, (batches, heads, rows, columns) = drawn
    bound, whole = bind(bias, shape), dense(bias, shape)
    expected = whole[batches, heads, rows, columns]
    for index in (rows, torch.arange(shape[2])[rows]):  # a slice, and a list of positions
        total = torch.zeros(expected.shape, dtype=torch.float64)
        for part in bound.parts_of_block(batches, heads, index, columns):
            total = total + part
        torch.testing.assert_close(total, expected)


@given(tiles())
def test_pairs_are_elements_of_the_bias(
    drawn: tuple[ScoreBias, tuple[int, int, int, int], list[slice]],
) -> None:
    bias, shape, _ = drawn
    i, j = torch.arange(shape[2] * shape[3]) // shape[3], torch.arange(shape[2] * shape[3])
    j = j % shape[3]
    total = torch.zeros(*shape[:2], len(i), dtype=torch.float64)
    for part in bind(bias, shape).parts_at_pairs(i, j):
        total = total + part
    torch.testing.assert_close(total, dense(bias, shape).flatten(2))


def test_it_knows_whether_a_gradient_flows() -> None:
    slopes = torch.ones(6)
    assert not bind(ScoreBias.alibi(slopes, align="top-left")).requires_grad
    assert bind(ScoreBias.alibi(slopes.requires_grad_(), align="top-left")).requires_grad
    assert bind(ScoreBias()).is_empty
    assert not bind(ScoreBias.dense(KEYS, axes="batch keys")).is_empty


def test_str_names_the_parts() -> None:
    bias = ScoreBias.alibi(SLOPES) + ScoreBias.relative(TABLE)
    assert str(bias + ScoreBias.dense(KEYS, axes="batch keys")) == (
        "alibi + relative + dense(3, 1, 1, 29)"
    )
    assert repr(ScoreBias()) == "ScoreBias(zero)"


NAN, TOO_HIGH = PAIRS.clone(), PAIRS.clone()
NAN[3, 4], TOO_HIGH[3, 4] = math.nan, math.inf
META = torch.zeros(24, 29, device="meta")
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], list[str]]] = {
    "a boolean": (
        lambda: ScoreBias.dense(PAIRS > 0, axes="queries keys"),
        MaskError,
        ["torch.bool", "Mask.may_attend"],
    ),
    "a list": (
        lambda: ScoreBias.dense([1.0], axes="keys"),  # type: ignore[arg-type]
        DTypeError,
        ["bias of type list"],
    ),
    "slopes in a list": (
        lambda: ScoreBias.alibi([1.0]),  # type: ignore[arg-type]
        DTypeError,
        ["slopes of type list"],
    ),
    "slopes for pairs": (
        lambda: ScoreBias.alibi(PAIRS),
        MaskError,
        ["(24, 29)", "floats of shape (heads)"],
    ),
    "a table in a list": (
        lambda: ScoreBias.relative([[1.0]]),  # type: ignore[arg-type]
        DTypeError,
        ["table of type list"],
    ),
    "a table of integers": (
        lambda: ScoreBias.relative(torch.zeros(6, 9, dtype=torch.int64)),
        MaskError,
        ["torch.int64", "(heads, distances)"],
    ),
    "a mask added": (
        lambda: ScoreBias.dense(PAIRS, axes="queries keys") + Mask.causal(),  # type: ignore[operator]
        MaskError,
        ["ScoreBias + ", "needed: a ScoreBias"],
    ),
    "axes out of order": (
        lambda: ScoreBias.dense(PAIRS, axes="keys queries"),
        MaskError,
        ["axes='keys queries'"],
    ),
    "an axis unnamed": (
        lambda: ScoreBias.dense(PER_HEAD, axes="queries keys"),
        MaskError,
        ["(6, 24, 29)", "2 axes"],
    ),
    "an even table": (
        lambda: ScoreBias.relative(normal(6, 8)),
        MaskError,
        ["8 distances", "9 columns for reach 4"],
    ),
    "alignment": (
        lambda: ScoreBias.alibi(SLOPES, align="bottom_right"),  # type: ignore[arg-type]
        OptionError,
        ["align='bottom_right'"],
    ),
    "alignment missing": (
        lambda: bind(ScoreBias.alibi(SLOPES)),
        MaskError,
        ["a alibi bias over 24 queries and 29 keys", "top-left", "bottom-right"],
    ),
    "other heads": (
        lambda: bind(ScoreBias.alibi(SLOPES[:4], align="top-left")),
        MaskError,
        ["4 heads", "6 heads"],
    ),
    "other sizes": (
        lambda: bind(ScoreBias.dense(PAIRS[:, :28], axes="queries keys")),
        MaskError,
        ["queries 24, keys 28", "keys 29"],
    ),
    "NaN": (
        lambda: bind(ScoreBias.dense(NAN, axes="queries keys")),
        MaskError,
        ["(1, 1, 24, 29)", "holds nan"],
    ),
    "plus infinity": (
        lambda: bind(ScoreBias.dense(TOO_HIGH, axes="queries keys")),
        MaskError,
        ["holds inf"],
    ),
    "NaN in a table": (
        lambda: bind(ScoreBias.alibi(SLOPES * math.nan, align="top-left")),
        MaskError,
        ["holds nan"],
    ),
    "another device": (
        lambda: bind(ScoreBias.dense(META, axes="queries keys")),
        DeviceError,
        ["a score bias on meta", "on cpu", 'bias.to("cpu")'],
    ),
}


test_what_cannot_be_meant_is_refused_with_its_numbers = refusals(REFUSED)
