"""Weights that were never loaded, seen from fewer tokens than would decide them."""

import pytest
import torch
from torch import Tensor

from benchmarks.compare.subjects import model_of, record
from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import Probe, default_probe
from benchmarks.faults.geometries import GEOMETRIES, Kind, layer_of
from headwise.diagnosis.causes.evidence import Evidence
from headwise.diagnosis.explained import NamedCause, search_causes
from headwise.identify.catalogue import CAUSES, INITIAL_WEIGHTS
from tests.quick import others_slow

GEOMETRY = next(each for each in GEOMETRIES if each.name == "gqa-rotary")
NAME = "weights at their initial values"


def searched(kind: Kind, **changed: Tensor) -> list[NamedCause]:
    right = layer_of(GEOMETRY, kind, Draw("weights", kind))
    with torch.no_grad():
        calls = record(right.with_weights(**changed), default_probe(GEOMETRY, Draw("probe")))
        return list(search_causes(Evidence.of(model_of(right), calls), CAUSES).causes)


def weights(name: str, kind: Kind) -> Tensor:
    return layer_of(GEOMETRY, kind, Draw("weights", kind)).all_weights()[name]


def drawn(name: str) -> Tensor:
    """The values that `torch.nn.Linear` begins with."""
    x = weights(name, "trained-like")
    generator = torch.Generator().manual_seed(4)
    uniform = torch.rand(x.shape, generator=generator, dtype=torch.float64)
    return (2 * uniform - 1) * x.shape[1] ** -0.5


@pytest.mark.parametrize("kind", ["trained-like", "init-like"])
@pytest.mark.parametrize("name", ["wq", "wo"])
def test_initial_values_are_named(kind: Kind, name: str) -> None:
    [named] = searched(kind, **{name: drawn(name)})
    assert named.cause.name == NAME
    assert named.variant.parameters["bound"] == pytest.approx(drawn(name).shape[1] ** -0.5)


@pytest.mark.slow
def test_other_weights_are_not_named() -> None:
    kind: Kind = "trained-like"
    assert searched(kind, wq=drawn("wq") * 1.3) == []
    assert searched(kind, wq=drawn("wq").sign() * drawn("wq").abs().sqrt()) == []
    assert searched(kind, wq=weights("wq", kind).roll(1, 1)) == []
    low_rank = drawn("wq")[:, :10] @ drawn("wq")[:10] * 5.6
    assert searched(kind, wq=low_rank) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", others_slow(["trained-like", "init-like"]))
def test_initial_values_that_still_hold_the_right_ones_are_not_named(kind: Kind) -> None:
    right = weights("wq", kind)
    mixed = 0.2 * drawn("wq").std() / right.std() * right + 0.96**0.5 * drawn("wq")
    assert searched(kind, wq=mixed) == []


def named_alone(tokens: int, **changed: Tensor) -> list[NamedCause]:
    """The causes of a change of an "init-like" layer, if initial values are the one in question."""
    mha = next(each for each in GEOMETRIES if each.name == "mha")
    right = layer_of(mha, "init-like", Draw("weights", "mha"))
    probe = Probe(Draw("probe").normal(1, tokens, mha.embed_dim))
    with torch.no_grad():
        calls = record(right.with_weights(**changed), probe)
    return list(search_causes(Evidence.of(model_of(right), calls), [INITIAL_WEIGHTS]).causes)


@pytest.mark.slow
def test_right_numbers_in_another_place_are_not_initial_values() -> None:
    mha = next(each for each in GEOMETRIES if each.name == "mha")
    stored = layer_of(mha, "init-like", Draw("weights", "mha")).all_weights()
    other_role = {"wq": stored["wk"], "bq": stored["bk"]}
    assert named_alone(60, **other_role) == []  # fewer tokens than the 96 columns
    columns_moved = {
        "wq": stored["wq"][:, torch.randperm(mha.embed_dim, generator=Draw("order").generator)]
    }
    assert named_alone(150, **columns_moved) == []  # the tokens decide every entry
    uniform = torch.rand(stored["wq"].shape, generator=Draw("fresh").generator).double()
    for tokens in (60, 150):
        [named] = named_alone(tokens, wq=(2 * uniform - 1) * mha.embed_dim**-0.5)
        assert named.cause.name == NAME
