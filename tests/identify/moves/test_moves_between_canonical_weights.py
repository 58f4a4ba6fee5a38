"""Moves between canonical weights: initial values, repeated kv heads, the output bias."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headwise.function.weights import State
from headwise.identify.moves.find import find_state_moves
from headwise.identify.moves.move import apply_moves
from tests.identify.moves.projections import GEOMETRIES, halves, projections

FRESH = "weights at their initial values"


def state_of(geometry: str, seed: int = 0) -> State:
    rows = projections(geometry, seed=seed)
    skewed = {n: x**3 if n[0] == "w" else x for n, x in rows.items()}  # as no initialisation is
    out_bias = torch.randn(GEOMETRIES[geometry][0], generator=torch.Generator().manual_seed(seed))
    return {**skewed, "bo": out_bias}


def compared(a: State, b: State) -> list[tuple[str, str, tuple[str, ...]]]:
    report = find_state_moves(a, b)
    assert report.unexplained == ()
    return [(move.cause.name, move.name.text, move.roles) for move in report.moves]


def uniform(x: Tensor, bound: float) -> Tensor:
    return (torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) * 2 - 1) * bound


def normal(x: Tensor, std: float) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) * std


@pytest.mark.parametrize(
    ("name", "drawn", "text"),
    [
        ("wk", lambda x: uniform(x, 80**-0.5), "uniform within 1/sqrt(inputs)"),
        ("wo", lambda x: uniform(x, 96**-0.5), "uniform within 1/sqrt(inputs)"),
        ("wq", lambda x: uniform(x, math.sqrt(6 / 176)), "Xavier uniform of one matrix"),
        ("wq", lambda x: uniform(x, math.sqrt(6 / 224)), "Xavier uniform of q, k and v fused"),
        ("wv", lambda x: normal(x, 0.02), "normal with standard deviation 0.02"),
        ("wo", lambda x: normal(x, 96**-0.5), "normal with standard deviation 1/sqrt(inputs)"),
    ],
)
def test_initial_values_are_recognised(name: str, drawn: object, text: str) -> None:
    b = state_of("gqa-of-4")
    assert callable(drawn)
    a = {**b, name: drawn(b[name])}
    assert compared(a, b) == [(FRESH, text, (name[1],))]


def test_norms_are_no_fused_rows() -> None:
    q_norm, k_norm = torch.randn(2, 12, generator=torch.Generator().manual_seed(2))
    a, b = {"q_norm": k_norm, "k_norm": q_norm}, {"q_norm": q_norm, "k_norm": k_norm}
    (move,) = find_state_moves({**state_of("mha"), **a}, {**state_of("mha"), **b}).moves
    causes = {name.cause.name for name in (move.name, *move.equals)}
    assert causes == {"norm weights of q and k exchanged"}


def test_other_weights_are_not_initial_ones() -> None:
    b = state_of("gqa-of-4")
    a = {**b, "wk": state_of("gqa-of-4", seed=9)["wk"]}
    report = find_state_moves(a, b)
    assert (report.moves, report.unexplained) == ((), ("k",))


@pytest.mark.parametrize("tiled", [False, True])
def test_repeated_kv_heads_are_compared(tiled: bool) -> None:
    b = state_of("gqa-of-2")
    names = ("wk", "wv", "bk", "bv")
    many = {
        name: torch.cat([b[name]] * 2) if tiled else b[name].repeat_interleave(2, 0)
        for name in names
    }
    expected = [("kv heads tiled instead of repeated", "3 heads in 6 places", ("k", "v"))]
    assert compared({**b, **many}, b) == (expected if tiled else [])


def test_the_output_bias_is_compared() -> None:
    b = state_of("mha")
    assert compared({**b, "bo": b["bo"].clone()}, b) == []
    assert compared({**b, "bo": b["bo"] * 0}, b) == [("bias missing", "all", ("bo",))]
    without = {name: x for name, x in b.items() if name != "bo"}
    assert compared(without, b) == [("bias missing", "", ("bo",))]
    assert compared({**b, "bo": b["bo"] * 5}, b) == [("factor", "5", ("bo",))]
    assert find_state_moves({**b, "bo": b["bo"] + 1}, b).unexplained == ("bo",)


def test_moves_apply_to_canonical_weights() -> None:
    b = {**state_of("mha"), "q_norm": torch.ones(16)}
    a = {**b, "wq": halves(b["wq"]).reshape(b["wq"].shape)}
    a["bq"] = halves(b["bq"][..., None]).reshape(b["bq"].shape)
    made = apply_moves(find_state_moves(a, b).moves, b)
    assert made.keys() == a.keys()
    assert all(torch.equal(made[name], a[name]) for name in a)
