"""Rotary position embedding: closed forms, the properties it is used for, and every way to run."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from headwise import Rotary
from headwise.errors import DeviceError, DTypeError, OptionError, ShapeError
from headwise.function.budget import Budget
from headwise.function.scaling import LinearScaling, YarnScaling
from tests.apart import assert_passed_apart
from tests.function.rotaries import pairs, rotaries, rounding
from tests.honest import HALVES, accumulation, normal
from tests.quick import others_extra
from tests.refusals import refusals

PAIRINGS = ("half-split", "interleaved")
LENGTH, FAR = 24, 5_000
POSITIONS = torch.arange(LENGTH) * 211 % FAR  # in no order
seeds = st.integers(0, 2**16)


def vectors(seed: int, head_dim: int, length: int = 5, dtype: Any = torch.float64) -> Tensor:
    return normal(2, 3, length, head_dim, seed=seed, dtype=dtype)


def positions_from(seed: int, length: int = 5) -> Tensor:
    return torch.randint(0, FAR, (length,), generator=torch.Generator().manual_seed(seed))


# ---- closed forms ------------------------------------------------------------------------------


def test_one_pair_by_hand() -> None:
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 4.0]], dtype=torch.float64)[None, None]
    turned = Rotary().rotate(x, torch.tensor([1, 1, 2]))[0, 0].tolist()
    (cos, sin), (cos2, sin2) = ((math.cos(a), math.sin(a)) for a in (1, 2))
    assert turned[0] == [cos, sin]
    assert turned[1] == [-sin, cos]
    assert turned[2] == [3 * cos2 - 4 * sin2, 4 * cos2 + 3 * sin2]


@pytest.mark.parametrize("width", [2, 8, 10, 64])
def test_frequencies_are_powers_of_theta(width: int) -> None:
    exact = torch.tensor([10_000.0 ** (-2 * i / width) for i in range(width // 2)]).double()
    found = Rotary(width=width).frequencies(64)
    assert found.dtype == torch.float32
    # An exponent rounded, which theta magnifies by its logarithm; a power; a division.
    eps = torch.finfo(torch.float32).eps / 2
    bound = eps * (math.log(10_000.0) + 2 + 1) * exact
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("width", [None, 6])
@pytest.mark.parametrize("scaling", [None, YarnScaling(4.0, 256)])
def test_a_pair_is_a_complex_number_that_turns(
    pairing: Any, width: int | None, scaling: YarnScaling | None
) -> None:
    rotary = Rotary(width=width, pairing=pairing, scaling=scaling)
    x = normal(3, 6, LENGTH, 10)
    found = rotary.rotate(x, POSITIONS)
    angles = POSITIONS[:, None].double() * rotary.frequencies(10).double()
    turn = torch.polar(torch.full_like(angles, rotary.amplitude), angles)
    bound = rounding(rotary, x, torch.zeros(LENGTH))  # the angles are the very same
    for (a, b), angle in zip(pairs(rotary, width or 10), turn.unbind(1), strict=True):
        exact = torch.complex(x[..., a], x[..., b]) * angle
        assert ((found[..., a] - exact.real).abs() <= bound).all()
        assert ((found[..., b] - exact.imag).abs() <= bound).all()
    assert torch.equal(found[..., width or 10 :], x[..., width or 10 :])


def test_what_is_not_rotated_passes_bit_for_bit() -> None:
    x = normal(3, 6, LENGTH, 10).bfloat16()
    x[0, 0, 0, 6:] = torch.tensor([math.inf, -math.inf, -0.0, math.nan])
    found = Rotary(width=6).rotate(x, POSITIONS)
    assert torch.equal(found[..., 6:].view(torch.int16), x[..., 6:].view(torch.int16))


# ---- properties --------------------------------------------------------------------------------


@given(rotaries(), seeds, st.integers(-FAR, FAR))
def test_scores_depend_on_differences_of_positions_only(
    drawn: tuple[Rotary, int], seed: int, shift: int
) -> None:
    rotary, head_dim = drawn
    q, k = vectors(seed, head_dim), vectors(seed + 1, head_dim, 7)
    at, key_at = positions_from(seed), positions_from(seed + 1, 7)
    scores = [
        rotary.rotate(q, at + moved) @ rotary.rotate(k, key_at + moved).mT for moved in (0, shift)
    ]
    largest = max(1.0, rotary.amplitude)
    bound = torch.zeros_like(scores[0])
    for moved in (0, shift):
        of_q = rounding(rotary, q, at + moved)[..., None] * k.norm(dim=-1)[..., None, :] * largest
        of_k = rounding(rotary, k, key_at + moved)[..., None, :] * q.norm(dim=-1)[..., None]
        product = head_dim * torch.finfo(torch.float64).eps * largest**2
        lengths = q.norm(dim=-1)[..., None] * k.norm(dim=-1)[..., None, :]
        bound += of_q + of_k * largest + product * lengths
    assert ((scores[0] - scores[1]).abs() <= bound).all()


@given(rotaries(), seeds)
def test_position_zero_is_the_vector_itself(drawn: tuple[Rotary, int], seed: int) -> None:
    rotary, head_dim = drawn
    x = vectors(seed, head_dim, dtype=torch.float32)
    found = rotary.rotate(x, torch.zeros(5, dtype=torch.long))
    width = rotary.rotated_width(head_dim)
    assert torch.equal(found[..., :width], x[..., :width] * rotary.amplitude)
    assert torch.equal(found[..., width:], x[..., width:])


@given(rotaries(), seeds, st.sampled_from((torch.float64, torch.float32)))
def test_lengths_are_kept(drawn: tuple[Rotary, int], seed: int, dtype: torch.dtype) -> None:
    rotary, head_dim = drawn
    x, at = vectors(seed, head_dim, dtype=dtype), positions_from(seed)
    width = rotary.rotated_width(head_dim)
    before = x[..., :width].double().norm(dim=-1) * rotary.amplitude
    after = rotary.rotate(x, at)[..., :width].double().norm(dim=-1)
    # The angle may be off by far more, but that turns a vector and does not stretch it.
    bound = rounding(rotary, x, torch.zeros(5)) + head_dim * 2**-53 * before
    assert ((after - before).abs() <= bound).all()


@given(rotaries(), seeds, st.sampled_from((torch.float64, torch.float32, torch.bfloat16)))
def test_pairings_differ_by_the_order_of_channels(
    drawn: tuple[Rotary, int], seed: int, dtype: torch.dtype
) -> None:
    rotary, head_dim = drawn
    width = rotary.rotated_width(head_dim)
    halves = Rotary(rotary.theta, width, "half-split", rotary.scaling)
    alternating = Rotary(rotary.theta, width, "interleaved", rotary.scaling)
    order = [channel for pair in pairs(halves, width) for channel in pair]
    order += range(width, head_dim)
    x, at = vectors(seed, head_dim, dtype=dtype), positions_from(seed)
    assert torch.equal(halves.rotate(x, at)[..., order], alternating.rotate(x[..., order], at))


@given(rotaries(), seeds)
def test_the_half_types_are_rotated_in_float32_and_rounded_once(
    drawn: tuple[Rotary, int], seed: int
) -> None:
    rotary, head_dim = drawn
    at = positions_from(seed)
    for dtype in HALVES:
        x = vectors(seed, head_dim, dtype=dtype)
        assert torch.equal(rotary.rotate(x, at), rotary.rotate(x.float(), at).to(dtype))


@given(rotaries(), seeds)
def test_each_sequence_may_have_its_own_positions(drawn: tuple[Rotary, int], seed: int) -> None:
    rotary, head_dim = drawn
    x = vectors(seed, head_dim, dtype=torch.float32)
    at = torch.stack([positions_from(seed), positions_from(seed + 1)])
    found = rotary.rotate(x, at)
    for row in range(2):
        assert torch.equal(found[row : row + 1], rotary.rotate(x[row : row + 1], at[row]))
    assert torch.equal(rotary.rotate(x, at[:1]), rotary.rotate(x, at[0]))


@given(rotaries(), seeds)
def test_both_is_each(drawn: tuple[Rotary, int], seed: int) -> None:
    rotary, head_dim = drawn
    q, k = vectors(seed, head_dim), vectors(seed + 1, head_dim)[:, :1]
    found = rotary.rotate_both(q, k, positions_from(seed))
    each = rotary.rotate(q, positions_from(seed)), rotary.rotate(k, positions_from(seed))
    assert torch.equal(found[0], each[0])
    assert torch.equal(found[1], each[1])


# ---- gradients ---------------------------------------------------------------------------------


@given(rotaries(), seeds, st.sampled_from((torch.float64, torch.float32, *HALVES)))
def test_the_gradient_turns_back(drawn: tuple[Rotary, int], seed: int, dtype: torch.dtype) -> None:
    rotary, head_dim = drawn
    x, at = vectors(seed, head_dim, dtype=dtype).requires_grad_(), positions_from(seed)
    grad_output = vectors(seed + 1, head_dim, dtype=dtype)
    (found,) = torch.autograd.grad(rotary.rotate(x, at), x, grad_output)
    assert torch.equal(found, rotary.rotate(grad_output, -at))


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_gradients_against_float64(pairing: Any, dtype: torch.dtype) -> None:
    rotary = Rotary(width=6, pairing=pairing, scaling=LinearScaling(4.0))
    x = normal(3, 6, LENGTH, 10, dtype=dtype).requires_grad_()
    grad_output = normal(3, 6, LENGTH, 10, seed=1, dtype=dtype)
    (found,) = torch.autograd.grad(rotary.rotate(x, POSITIONS), x, grad_output)
    wide, exact = grad_output.double(), grad_output.double().clone()
    angles = POSITIONS[:, None].double() * rotary.frequencies(10).double()
    for (a, b), angle in zip(pairs(rotary, 6), angles.unbind(1), strict=True):
        exact[..., a] = angle.cos() * wide[..., a] + angle.sin() * wide[..., b]
        exact[..., b] = angle.cos() * wide[..., b] - angle.sin() * wide[..., a]
    bound = rounding(rotary, grad_output.to(accumulation(dtype)), POSITIONS)
    allowed = bound[..., None].expand_as(exact)
    axes = ("batch", "heads", "length", "head_dim")
    Budget("gradient of x", dtype, exact, allowed, axes).assert_holds(found)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_double_backward(pairing: Any) -> None:
    rotary, x = Rotary(width=6, pairing=pairing), normal(1, 2, 3, 10).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: rotary.rotate(x, POSITIONS[:3]) ** 2, x)


# ---- every way to run --------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", others_extra(["half", "not half"]))
def test_compiled_and_exported(chosen: str) -> None:
    count = 2 if chosen == "half" else 6
    assert_passed_apart(Path(__file__).with_name("compiled.py"), count=count, chosen=chosen)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # torch's own, at its first jvp
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_under_transforms_autocast_and_without_values(pairing: Any) -> None:
    rotary = Rotary(width=6, pairing=pairing)
    x, at = normal(4, 3, 6, LENGTH, 10), POSITIONS
    expected = torch.stack([rotary.rotate(one, at) for one in x])
    assert torch.equal(torch.func.vmap(lambda one: rotary.rotate(one, at))(x), expected)
    shifted = torch.stack([at, at + 1])
    by_position = torch.func.vmap(lambda at: rotary.rotate(x[0], at))(shifted)
    assert torch.equal(by_position[1], rotary.rotate(x[0], at + 1))
    _, tangent = torch.func.jvp(lambda x: rotary.rotate(x, at), (x[0],), (x[1],))
    assert torch.equal(tangent, expected[1])
    half, single = x[0].bfloat16(), x[0].float()
    expected_half, expected_single = rotary.rotate(half, at), rotary.rotate(single, at)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(rotary.rotate(half, at), expected_half)
        assert torch.equal(rotary.rotate(single, at), expected_single)
    assert rotary.rotate(x[0].to("meta"), at.to("meta")).shape == x[0].shape
    with FakeTensorMode():
        assert rotary.rotate(torch.empty(3, 6, LENGTH, 10), torch.arange(LENGTH)).shape[2] == LENGTH


def test_what_inference_keeps_serves_training() -> None:
    rotary, x = Rotary(theta=777.0), normal(3, 6, LENGTH, 10)
    with torch.inference_mode():
        expected = rotary.rotate(x, POSITIONS).clone()
    y = x.clone().requires_grad_()
    found = rotary.rotate(y, POSITIONS)
    assert torch.equal(found, expected)
    found.sum().backward()


def test_a_default_device_does_not_matter() -> None:
    x = normal(3, 6, LENGTH, 10)
    with torch.device("meta"):
        found = Rotary(theta=778.0).rotate(x, POSITIONS)
    assert torch.equal(found, Rotary(theta=778.0).rotate(x, POSITIONS))


# ---- refusals ----------------------------------------------------------------------------------

X = torch.zeros(3, 6, LENGTH, 10)
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], list[str]]] = {
    "theta 0": (lambda: Rotary(theta=0.0), OptionError, ["theta=0.0", "positive"]),
    "theta nan": (lambda: Rotary(theta=math.nan), OptionError, ["theta=nan"]),
    "theta inf": (lambda: Rotary(theta=math.inf), OptionError, ["theta=inf"]),
    "width 0": (lambda: Rotary(width=0), OptionError, ["width=0", "from 2"]),
    "width odd": (lambda: Rotary(width=7), OptionError, ["width=7", "even"]),
    "width negative": (lambda: Rotary(width=-2), OptionError, ["width=-2"]),
    "width a share": (lambda: Rotary(width=0.5), OptionError, ["width=0.5", "head_dim // 2"]),  # type: ignore[arg-type]
    "pairing": (
        lambda: Rotary(pairing="neox"),  # type: ignore[arg-type]
        OptionError,
        ["pairing='neox'", "half-split", "interleaved"],
    ),
    "scaling": (
        lambda: Rotary(scaling=4.0),  # type: ignore[arg-type]
        OptionError,
        ["scaling=4.0", "LinearScaling"],
    ),
    "too wide": (
        lambda: Rotary(width=12).rotate(X, POSITIONS),
        OptionError,
        ["width of 12", "head_dim of 10", "width=10"],
    ),
    "odd head": (
        lambda: Rotary().rotated_width(7),
        OptionError,
        ["width of 7", "head_dim of 7", "even", "width=6"],
    ),
    "head of one": (lambda: Rotary().rotated_width(1), OptionError, ["head_dim of 1", "wider"]),
    "3-D": (lambda: Rotary().rotate(X[0], POSITIONS), ShapeError, ["(6, 24, 10)", "split"]),
    "whole numbers": (
        lambda: Rotary().rotate(X.long(), POSITIONS),
        DTypeError,
        ["x of dtype torch.int64"],
    ),
    "other length": (
        lambda: Rotary().rotate(X, POSITIONS[:20]),
        ShapeError,
        ["(20,)", "length 24"],
    ),
    "other batch": (
        lambda: Rotary().rotate(X, POSITIONS.expand(2, -1)),
        ShapeError,
        ["(2, 24)", "batch 3"],
    ),
    "other keys": (
        lambda: Rotary().rotate_both(X, X[:, :2, :20], POSITIONS),
        ShapeError,
        ["(3, 6, 24, 10)", "(3, 2, 20, 10)", "own positions"],
    ),
    "fractions": (
        lambda: Rotary().rotate(X, POSITIONS / 2),
        DTypeError,
        ["torch.float32", "scaling"],
    ),
    "device": (
        lambda: Rotary().rotate(X, POSITIONS.to("meta")),
        DeviceError,
        ["positions on meta", "x on cpu"],
    ),
}


test_what_cannot_be_meant_is_refused_with_its_numbers = refusals(REFUSED)
