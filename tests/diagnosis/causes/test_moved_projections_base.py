"""Mistakes in the projections of a running layer, named from its recorded stages."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise
from benchmarks.compare.subjects import model_of, record
from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import default_probe
from benchmarks.faults.geometries import GEOMETRIES, layer_of
from benchmarks.faults.reference_layer import ReferenceLayer
from headwise.diagnosis.causes.evidence import Evidence
from headwise.diagnosis.explained import NamedCause, search_causes
from headwise.identify.catalogue import CAUSES
from tests.quick import others_slow

Edit = Callable[[dict[str, Tensor]], Mapping[str, Tensor | None]]


def layer(geometry: str) -> ReferenceLayer:
    chosen = next(each for each in GEOMETRIES if each.name == geometry)
    return layer_of(chosen, "trained-like", Draw("weights", geometry))


def searched(geometry: str, right: ReferenceLayer, wrong: ReferenceLayer) -> list[NamedCause]:
    chosen = next(each for each in GEOMETRIES if each.name == geometry)
    with torch.no_grad():
        calls = record(wrong, default_probe(chosen, Draw("probe", geometry)))
        result = search_causes(Evidence.of(model_of(right), calls), CAUSES)
    assert not result.left.cells_beyond_rounding or not result.causes
    return list(result.causes)


def heads_of(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(0, (heads, -1))


def swapped(first: str, second: str) -> Edit:
    pairs = {first: second, second: first}
    return lambda w: {f"{kind}{a}": w[f"{kind}{b}"] for a, b in pairs.items() for kind in "wb"}


def per_head(edit: Callable[[Tensor], Tensor], heads: int, *names: str) -> Edit:
    return lambda w: {name: edit(heads_of(w[name], heads)).reshape_as(w[name]) for name in names}


def grouped(x: Tensor) -> Tensor:
    """Rows of 6 heads, stored (group, kv_heads) and read (kv_heads, group)."""
    return x.unflatten(0, (3, 2)).transpose(0, 1)


CASES: list[tuple[str, Edit, str, dict[str, Any]]] = [
    ("mha", swapped("q", "k"), "q and k exchanged", {"roles": "qk"}),
    ("mha", swapped("q", "v"), "q and v exchanged", {"roles": "qv"}),
    ("alibi-encoder", swapped("k", "v"), "k and v exchanged", {"roles": "kv"}),
    (
        "gqa-rotary",
        per_head(lambda x: x.transpose(0, 1), 6, "wq"),
        "heads interleaved",
        {"roles": "q"},
    ),
    ("gqa-rotary", per_head(lambda x: x[[1, 0]], 2, "wv"), "heads permuted", {"order": (1, 0)}),
    (
        "gqa-rotary",
        lambda w: {"wo": grouped(heads_of(w["wo"].T, 6)).reshape(120, -1).T},
        "output heads in another group order",
        {"roles": "o"},
    ),
    ("square-alibi", lambda w: {"wo": w["wo"].T}, "square matrix transposed", {"roles": "o"}),
    ("square-rotary", lambda w: {"wk": w["wk"].T}, "square matrix transposed", {"roles": "k"}),
    ("mha", lambda w: {"wq": -w["wq"], "bq": -w["bq"]}, "sign", {"roles": "q"}),
    ("mha", lambda w: {"wk": w["wk"] * 0.3}, "factor", {"roles": "k", "factor": 0.3}),
    ("mha", lambda w: {"wo": w["wo"] * 3, "bo": w["bo"] * 3}, "factor", {"factor": 3}),
    ("mha", lambda w: {"wv": w["wv"] * 0}, "rows zero", {"roles": "v"}),
    ("mha", lambda w: {"bq": None, "bk": None}, "bias missing", {"roles": "qk"}),
    (
        "mqa",
        lambda w: {"wq": w["wq"].bfloat16().double()},
        "dtype's rounding of weights",
        {"dtype": "torch.bfloat16"},
    ),
]


@pytest.mark.parametrize(("geometry", "edit", "cause", "parameters"), CASES)
def test_a_mistake_in_the_weights_is_named(
    geometry: str, edit: Edit, cause: str, parameters: dict[str, Any]
) -> None:
    right = layer(geometry)
    [named] = searched(geometry, right, right.with_weights(**edit(right.all_weights())))
    assert named.cause.name == cause
    reported = named.variant.parameters
    for name, value in parameters.items():
        is_number = isinstance(value, float | int)
        assert reported[name] == (pytest.approx(value, rel=1e-9) if is_number else value)


def halves(x: Tensor) -> Tensor:
    """Interleaved pairs (2i, 2i + 1) of each head as half-split ones."""
    return x.unflatten(1, (-1, 2)).transpose(1, 2)


def pairs(x: Tensor) -> Tensor:
    return x.unflatten(1, (2, -1)).transpose(1, 2)


@pytest.mark.parametrize(
    ("geometry", "edit", "cause"),
    [
        ("gqa-rotary", pairs, "rotary permutation missing"),
        ("gqa-rotary", halves, "rotary permutation doubled"),
        ("square-rotary", halves, "rotary permutation missing"),
        ("square-rotary", pairs, "rotary permutation doubled"),
    ],
)
def test_the_pairing_of_the_layer_decides_the_word(
    geometry: str, edit: Callable[[Tensor], Tensor], cause: str
) -> None:
    right = layer(geometry)
    weights = right.all_weights()
    heads = right.geometry.num_heads
    names = [name for name in ("wq", "bq") if name in weights]
    changed = per_head(edit, heads, *names)(weights)
    [named] = searched(geometry, right, right.with_weights(**changed))
    assert named.cause.name == cause


def test_tiled_kv_heads_of_scores_and_head_outputs_are_one_cause() -> None:
    right = layer("gqa-rotary")
    wrong = right.with_stages(repeated=lambda layer, x: x.repeat(1, 1, 3, 1))
    [named] = searched("gqa-rotary", right, wrong)
    assert named.cause.name == "kv heads tiled instead of repeated"
    assert named.stages == ("scores", "head outputs")


@pytest.mark.slow
def test_separate_mistakes_are_all_named() -> None:
    right = layer("mha")
    weights = right.all_weights()
    edits = {**swapped("q", "k")(weights), **per_head(lambda x: x.flip(0), 6, "wv", "bv")(weights)}
    causes = [named.cause.name for named in searched("mha", right, right.with_weights(**edits))]
    assert sorted(causes) == ["heads permuted", "q and k exchanged"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "edit",
    others_slow(
        [
            lambda w: {"wk": w["wk"] + 0.01 * w["wk"].roll(1, 1)},
            lambda w: {"wv": w["wv"].square()},
            lambda w: {"wo": w["wo"] + 0.01 * w["wo"].roll(1, 0)},
        ]
    ),
)
def test_another_change_is_no_move(edit: Edit) -> None:
    right = layer("mha")
    assert searched("mha", right, right.with_weights(**edit(right.all_weights()))) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source_dim", "pairs"),
    others_slow([(None, "qk qo kq vk ok ov"), (29, "kv vk qo oq")], (29, "kv vk qo oq")),
)
def test_a_projection_loaded_as_another_one_is_named(source_dim: int | None, pairs: str) -> None:
    torch.manual_seed(0)
    right = headwise.Attention(40, 5, source_dim=source_dim).eval()
    names = {role: f"{role}_proj" for role in "qkv"} | {"o": "out_proj"}
    for role, source in pairs.split():
        wrong = deepcopy(right)
        stored = getattr(right, names[source]).state_dict()
        getattr(wrong, names[role]).load_state_dict(stored)
        comparison = headwise.compare(wrong, right).function
        assert comparison is not None
        [cause] = comparison.causes
        assert (cause.name, cause.side) == ("rows of another role", "first")
        assert cause.parameters == {"roles": role, "source": source}


@pytest.mark.slow
def test_two_mistakes_in_the_same_rows_are_both_named() -> None:
    right = layer("gqa-rotary")
    weights = right.all_weights()
    once = per_head(pairs, 6, "wq")(weights)["wq"]
    assert once is not None
    twice = heads_of(once, 6).transpose(0, 1).reshape_as(once)
    first, second = searched("gqa-rotary", right, right.with_weights(wq=twice))
    assert [first.cause.name, second.cause.name] == [
        "rotary permutation missing",
        "heads interleaved",
    ]
