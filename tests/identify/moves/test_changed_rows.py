"""Moves beneath a rounding, a sign or a factor; rows of zeros; and biases."""

from __future__ import annotations

import pytest
import torch

from headwise.function.weights import State
from headwise.identify.moves.find import find_moves
from headwise.identify.moves.maps import join_rows
from headwise.identify.moves.move import apply_moves
from tests.identify.moves.projections import (
    assert_same_rows,
    by_channel,
    edited,
    halves,
    is_exact,
    pairs,
    projections,
    without_biases,
)

F64 = torch.float64


def causes(a: State, b: State, **options: float) -> list[tuple[str, tuple[str, ...]]]:
    report = find_moves(a, b, **options)  # type: ignore[arg-type]
    assert report.unexplained == ()
    return [(move.cause.name, move.roles) for move in report.moves]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_a_rounding_is_named_beside_a_move(dtype: torch.dtype) -> None:
    b = without_biases(projections("gqa-of-4"))
    a = edited(edited(b, pairs, "q", "k"), lambda x: x.to(dtype).to(x.dtype), "q", "k", "v", "o")
    assert causes(a, b) == [
        ("rotary permutation missing", ("q", "k")),
        ("dtype's rounding of weights", ("q", "k", "v", "o")),
    ]
    assert_same_rows(apply_moves(find_moves(a, b).moves, b), a)


def test_weights_stored_in_another_dtype_are_compared() -> None:
    b = without_biases(projections("mha"))
    a = {name: x.to(torch.bfloat16) for name, x in without_biases(b).items()}
    assert causes(a, b) == [("dtype's rounding of weights", ("q", "k", "v", "o"))]
    assert causes(b, a) == [("dtype's rounding of weights", ("q", "k", "v", "o"))]


@pytest.mark.parametrize("noise", [1e-14, 0.0])
def test_moves_of_activations_are_found_beneath_rounding(noise: float) -> None:
    b = without_biases(projections("mha", dtype=F64))
    drawn = torch.Generator().manual_seed(5)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + noise * torch.randn(x.shape, generator=drawn, dtype=F64))

    a = edited(edited(edited(b, by_channel, "v"), halves, "k"), rounded, "q", "k", "v", "o")
    assert set(causes(a, b)) == {
        ("heads interleaved", ("v",)),
        ("rotary permutation doubled", ("k",)),
    }
    report = find_moves(a, b)
    assert max(report.residual.values()) <= 10 * noise
    assert is_exact(report) == (noise == 0)


def test_noise_beyond_the_tolerance_is_not_explained() -> None:
    b = without_biases(projections("mha", dtype=F64))
    a = edited(edited(b, pairs, "q"), lambda x: x * 1.0001 + 1e-4 * x.roll(1, 2), "q")
    assert find_moves(a, b).unexplained == ("q",)
    assert causes(a, b, tolerance=1e-2)[0] == ("rotary permutation missing", ("q",))


@pytest.mark.parametrize("factor", [-1.0, 0.25, -0.125, 16**-0.5, 80**-0.5, 1.4426950408889634])
def test_a_factor_is_measured(factor: float) -> None:
    b = without_biases(projections("gqa-of-4", dtype=F64))
    a = edited(b, lambda x: x * factor, "q")
    [move] = find_moves(a, b).moves
    assert (move.cause.name, move.roles) == ("sign" if factor == -1 else "factor", ("q",))
    assert dict(move.name.parameters)["factor"] == pytest.approx(factor, rel=1e-12)
    a = edited(edited(b, pairs, "q", "k"), lambda x: x * factor, "q")
    first, second = find_moves(a, b).moves
    assert (first.cause.name, first.roles) == ("rotary permutation missing", ("q", "k"))
    assert (second.cause.name, second.roles) == (move.cause.name, ("q",))


def test_a_factor_of_some_heads_or_channels_says_which() -> None:
    b = without_biases(projections("mha", dtype=F64))
    a = edited(b, torch.clone, "k", "q", "v")
    a["wk"][2] *= 3
    a["wq"][:, 8:] *= -1
    a["wv"][:, 1::2] *= -1
    moves = {move.roles: move for move in find_moves(a, b).moves}
    assert moves["k",].cause.name == "factor"
    assert dict(moves["k",].name.parameters)["heads"] == (2,)
    assert moves["q",].name.text.endswith("the second half of each head")
    assert moves["v",].name.text.endswith("the odd channels of each head")
    assert {moves["q",].cause.name, moves["v",].cause.name} == {"sign"}


def test_factors_near_one_that_differ_between_heads_are_not_named() -> None:
    b = without_biases(projections("mha", dtype=F64))
    a = edited(b, torch.clone, "k")
    for head, matrix in enumerate(a["wk"]):
        matrix *= 1 + 1e-5 * (head + 1)
    report = find_moves(a, b)
    assert (report.moves, report.unexplained) == ((), ("k",))


def test_rows_of_zeros_are_listed() -> None:
    b = without_biases(projections("mha"))
    a = edited(edited(b, torch.clone, "k"), torch.zeros_like, "v")
    a["wk"][[1, 4]] = 0
    moves = {move.roles: move for move in find_moves(a, b).moves}
    assert {move.cause.name for move in moves.values()} == {"rows zero"}
    assert dict(moves["k",].name.parameters)["heads"] == (1, 4)
    assert moves["v",].name.text == "all"
    assert_same_rows(apply_moves(find_moves(a, b).moves, b), a)


def test_a_role_that_is_new_leaves_the_others_explained() -> None:
    b = without_biases(projections("mha"))
    a = edited(edited(b, pairs, "q", "k"), lambda x: torch.randn(x.shape), "v")
    report = find_moves(a, b)
    assert report.unexplained == ("v",)
    assert [(move.cause.name, move.roles) for move in report.moves] == [
        ("rotary permutation missing", ("q", "k"))
    ]


def test_three_mistakes_of_separate_roles_are_all_named() -> None:
    b = without_biases(projections("square"))
    a = edited(edited(b, pairs, "q", "k"), by_channel, "v")
    a = {**a, "wo": join_rows(b, "o").T.reshape(b["wo"].shape)}
    assert sorted(causes(without_biases(a), b)) == [
        ("heads interleaved", ("v",)),
        ("rotary permutation missing", ("q", "k")),
        ("square matrix transposed", ("o",)),
    ]


def test_transposed_activations_are_recognised() -> None:
    """A transposed matrix is nothing that one can see on activations, but for those it makes."""
    weights = without_biases(projections("square", dtype=F64))
    x = torch.randn(64, 40, dtype=F64, generator=torch.Generator().manual_seed(2))

    def activations(*, transposed: bool) -> State:
        flat = {role: join_rows(weights, role) for role in "qkv"}
        made = {role: (w.T if transposed else w) @ x for role, w in flat.items()}
        return {f"w{role}": y.view(4, 16, -1) for role, y in made.items()}

    b, turned = activations(transposed=False), activations(transposed=True)
    a = {**b, "wk": turned["wk"] * (1 + 1e-15)}
    assert causes(a, b, transposed=turned) == [("square matrix transposed", ("k",))]
    a = edited(a, halves, "k")
    first, second = find_moves(a, b, transposed=turned).moves
    assert (first.cause.name, second.cause.name) == (
        "square matrix transposed",
        "rotary permutation doubled",
    )
    assert find_moves(a, b).unexplained == ("k",)


def test_biases_may_stay_where_they_are() -> None:
    """A permutation that forgets the biases."""
    b = projections("gqa-of-4")
    a = {**b, **without_biases(edited(b, pairs, "q", "k"))}
    [move] = find_moves(a, b).moves
    assert (move.cause.name, move.roles, move.change.parts) == (
        "rotary permutation missing",
        ("q", "k"),
        ("weights",),
    )
    assert_same_rows(apply_moves(find_moves(a, b).moves, b), a)


def test_biases_may_move_alone() -> None:
    b = projections("mha")
    a = {**b, "bk": b["bv"], "bv": b["bk"]}
    [move] = find_moves(a, b).moves
    assert (move.cause.name, move.roles, move.change.parts) == (
        "k and v exchanged",
        ("k", "v"),
        ("biases",),
    )
    assert_same_rows(apply_moves(find_moves(a, b).moves, b), a)


def test_biases_may_be_zero_missing_or_new() -> None:
    b = projections("mha")
    zero = torch.zeros_like(b["bk"])
    a = {**without_biases(b), "bk": zero, "bv": b["bv"]}
    assert [str(move) for move in find_moves(a, b).moves] == [
        "bias missing (q, biases alone)",
        "bias missing: zero (k, biases alone)",
    ]
    assert_same_rows(apply_moves(find_moves(a, b).moves, b), a)
    absent = {name: x for name, x in b.items() if name != "bk"}
    assert causes({**absent, "bk": zero}, absent) == []
    a = {**b, "bq": torch.randn(b["bq"].shape)}
    assert find_moves(a, b).unexplained == ("bias of q",)


def test_a_factor_of_weights_may_leave_the_bias_out() -> None:
    b = projections("mha", dtype=F64)
    a = {**b, "wq": b["wq"] / 4}
    moves = find_moves(a, b)
    assert_same_rows(apply_moves(moves.moves, b), a)
    assert moves.unexplained == ()
    assert [(move.cause.name, move.change.parts) for move in moves.moves] == [
        ("factor", ("weights",))
    ]


@pytest.mark.parametrize("factor", [0.25, -8.0])
def test_a_power_of_two_is_exact_in_single_precision(factor: float) -> None:
    b = without_biases(projections("gqa-of-4"))
    report = find_moves(edited(b, lambda x: x * factor, "v"), b)
    assert is_exact(report)
    assert dict(report.moves[0].name.parameters)["factor"] == factor
