"""Second set of the fault bench: each fault acts, and acts first where its truth says."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks import second_faults
from benchmarks.compare import suites
from benchmarks.compare.__main__ import main
from benchmarks.compare.second_suites import SECOND_SUITES
from benchmarks.faults import cases as first_set
from benchmarks.faults import freeze
from benchmarks.faults.cases import CaseKey
from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import (
    BATCH,
    QUERIES,
    FaultCase,
    Probe,
    Subject,
    default_probe,
    distance,
)
from benchmarks.faults.geometries import GEOMETRIES
from benchmarks.faults.geometry import Geometry
from benchmarks.faults.injectors import INJECTORS
from benchmarks.faults.injectors.injector import Injector
from benchmarks.faults.reference_layer import ReferenceLayer
from benchmarks.faults.same import SAME
from benchmarks.faults.subtle import SUBTLE
from benchmarks.second_faults.cases import REPEATED, case_of, fault_keys, layer_for, pair_keys
from benchmarks.second_faults.geometries import SECOND_GEOMETRIES
from benchmarks.second_faults.mechanisms import SECOND_MECHANISMS
from benchmarks.second_faults.variants import VARIANTS
from tests.benchmarks.partings import assert_parts_as_stated

FOLDER = Path(second_faults.__file__).parent
NEW = (*VARIANTS, *SECOND_MECHANISMS)
EVERY = [each for each in (*REPEATED, *NEW) if any(map(each.applies, SECOND_GEOMETRIES))]


@pytest.mark.parametrize("injector", EVERY, ids=lambda injector: injector.name)
def test_the_fault_acts_first_where_its_truth_says(injector: Injector) -> None:
    for key in fault_keys([injector]):
        assert_parts_as_stated(case_of(key), key)


@pytest.mark.parametrize("injector", NEW, ids=lambda injector: injector.name)
def test_every_form_of_a_new_fault_acts(injector: Injector) -> None:
    for key in fault_keys([injector], range(1, 7)):
        assert_parts_as_stated(case_of(key), key)


@pytest.mark.parametrize("key", list(pair_keys(SAME)), ids=str)
def test_same_pairs_are_the_same_function(key: CaseKey) -> None:
    [pair] = [each for each in SAME if each.name == key.fault]
    good = layer_for(key)
    assert output_gap(good, pair.make(good, Draw("same", str(key)))) < 1e-10


@pytest.mark.parametrize("key", list(pair_keys(SUBTLE)), ids=str)
def test_subtle_pairs_differ(key: CaseKey) -> None:
    [pair] = [each for each in SUBTLE if each.name == key.fault]
    assert output_gap(*pair.make(layer_for(key), Draw("subtle", str(key)))) > 1e-9


def output_gap(good: Subject, faulty: Subject) -> float:
    assert isinstance(good, ReferenceLayer)
    probe = default_probe(good.geometry, Draw("x"))
    (a,), (b,) = probe.run(good), probe.run(faulty)
    return distance(a["output"], b["output"])


def test_causes_are_those_of_the_first_set() -> None:
    known = {injector.name for injector in INJECTORS}
    for key in fault_keys(VARIANTS):
        truth = case_of(key).truth
        assert {truth.cause, *truth.equals} <= known, key
    names = [each.name for each in (*first_set.INJECTORS, *first_set.MECHANISMS, *NEW)]
    assert len(names) == len(set(names))
    assert all("#" in (type(variant).__doc__ or "") for variant in VARIANTS)


def injected(fault: str, layer: ReferenceLayer, seed: int) -> FaultCase:
    [injector] = [each for each in EVERY if each.name == fault]
    return injector.inject(layer, Draw(fault, seed))


@pytest.mark.parametrize("geometry", SECOND_GEOMETRIES, ids=lambda geometry: geometry.name)
def test_the_inverse_of_head_dim_is_the_scale_twice(geometry: Geometry) -> None:
    layer = layer_for(CaseKey("", geometry.name, "trained-like", 0))
    twice = injected("scale twice", layer, 0).faulty
    seen = set()
    for seed in range(12):
        case = injected("scale: other constants", layer, seed)
        equal = output_gap(twice, case.faulty) < 1e-12
        assert ("scale twice" in case.truth.equals) == equal
        seen.add(equal)
    assert seen == {True, False}


def test_a_case_is_replayed_from_its_text() -> None:
    for key in fault_keys(NEW):
        first, second = case_of(key), case_of(CaseKey.parse(str(key)))
        assert first.truth == second.truth
        assert torch.equal(first.probe.x, second.probe.x)
        weights = first.faulty.state_dict(), second.faulty.state_dict()
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
        other = case_of(CaseKey(key.fault, key.geometry, key.weights, 1))
        assert not torch.equal(first.probe.x, other.probe.x)


def sizes(g: Geometry) -> list[int]:
    rows = {heads * d for heads in (g.num_heads, g.num_kv_heads) for d in (g.head_dim, g.value_dim)}
    heads, channels = {g.num_heads, g.num_kv_heads}, {g.head_dim, g.value_dim}
    return [BATCH, QUERIES, g.embed_dim, *heads, *channels, *rows]


def test_axes_have_sizes_of_their_own() -> None:
    for g in SECOND_GEOMETRIES:
        assert len(sizes(g)) == len(set(sizes(g))), g.name
        assert all(sizes(g) != sizes(other) for other in GEOMETRIES)


def test_the_files_are_those_that_were_frozen() -> None:
    assert freeze.is_frozen(FOLDER)
    assert freeze.digest(freeze.frozen_files(FOLDER), FOLDER) != freeze.digest(
        freeze.frozen_files()
    )


def test_the_suites_hold_each_case_once() -> None:
    cases = [case for suite in SECOND_SUITES.values() for case in suite(20)]
    keys = [case.key for case in cases]
    pairs = [str(key) for key in (*pair_keys(SAME), *pair_keys(SUBTLE))]
    assert sorted(keys) == sorted([*map(str, fault_keys(EVERY)), *pairs])
    assert len(set(keys)) == len(keys)
    assert {case.geometry for case in cases} == {g.name for g in SECOND_GEOMETRIES}
    few = Counter(case.fault for suite in SECOND_SUITES.values() for case in suite(1))
    assert set(few.values()) == {1}


class ComparedError(Exception):
    """Stands for the result of a comparison."""


def compared(good: Subject, faulty: Subject, probes: list[Probe]) -> None:
    outputs = [probes[0].run(layer)[-1]["output"] for layer in (good, faulty)]
    raise ComparedError(good, distance(*outputs))


@pytest.mark.parametrize("suite", SECOND_SUITES)
def test_a_suite_compares_the_layers_of_its_keys(
    suite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suites, "diagnosis_of", compared)
    for case in SECOND_SUITES[suite](1):
        with pytest.raises(ComparedError) as raised:
            case.score()
        good, gap = raised.value.args
        assert good.geometry.name == case.geometry
        assert (gap < 1e-10) == suite.endswith("same"), case.key


def test_the_runner_takes_the_second_set_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "diagnosis_of", compared)
    with pytest.raises(ComparedError) as raised:
        main(["--suite", "second", "--case", "bitwise copy:layer-norm-groups:trained-like:0"])
    assert raised.value.args[1] == 0.0
