"""Suites of the fault bench: each case gives a result and says whether that is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.compare.parameters import find_wrong_parameters, parameters_agree
from benchmarks.compare.subjects import ReferenceSubject, inputs_of, run_of
from benchmarks.faults.cases import CaseKey, case_of, enough_keys, layer_for
from benchmarks.faults.composed import models, pairs
from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import FaultCase, LayerStack, Probe, Truth, default_probe
from benchmarks.faults.fault_case import Subject as Layer
from benchmarks.faults.geometries import GEOMETRIES, KINDS
from benchmarks.faults.injectors import INJECTORS
from benchmarks.faults.reference_layer import ReferenceLayer
from benchmarks.faults.same import SAME
from benchmarks.faults.subtle import SUBTLE
from benchmarks.faults.unknown import MECHANISMS
from headwise.diagnosis.attentions import Comparison
from headwise.diagnosis.model_runs import compare_runs
from headwise.diagnosis.probes import NamedInputs, make_probe_inputs
from headwise.identify.catalogue import CAUSES, Cause
from headwise.identify.results import Diagnosis, Verdict

# Names of one function, stated beforehand: fault -> causes that are also right.
EQUALS: dict[str, frozenset[str]] = {}


@dataclass(frozen=True)
class Scored:
    """Result of a case.

    Attributes:
        fault: the row of the table.
        key: what makes the case again.
        answer: the causes that were named, or the verdict.
        is_right: whether that is the truth.
        has_wrong_cause: whether a cause was named that is not the truth.
        truths: for each fault of the case, its cause and those that are the same function.
        named: the causes that were named.
        by_other_name: whether what was named is the same function as the truth, by another name.
    """

    fault: str
    key: str
    answer: str
    is_right: bool
    has_wrong_cause: bool = False
    truths: tuple[tuple[str, ...], ...] = ()
    named: tuple[str, ...] = ()
    by_other_name: bool = False


@dataclass(frozen=True)
class Case:
    """A case to run; ``score`` makes the result."""

    fault: str
    geometry: str
    key: str
    score: Callable[[], Scored]

    @property
    def seed(self) -> int:
        """The seed of the case, the last part of its key."""
        return int(self.key.partition(" + ")[0].rpartition(":")[2])


def singles(count: int) -> Iterator[Case]:
    """Return ``count`` cases of every fault."""
    for injector in INJECTORS:
        for key in enough_keys(injector, count)[:count]:
            yield Case(key.fault, key.geometry, str(key), partial(score_single, key))


def left_out(count: int) -> Iterator[Case]:
    """Return ``count`` cases of every fault of a layer, with its cause taken from the catalogue."""
    for injector in (each for each in INJECTORS if each.family != "layers"):
        for key in enough_keys(injector, count)[:count]:
            yield Case(key.fault, key.geometry, str(key), partial(_left_out, key))


def unknowns(count: int) -> Iterator[Case]:
    """Return ``count`` cases of every mechanism that no cause describes."""
    for mechanism in MECHANISMS:
        for key in enough_keys(mechanism, count)[:count]:
            yield Case(key.fault, key.geometry, str(key), partial(score_unknown, key))


def same(count: int) -> Iterator[Case]:
    """Return about ``count`` pairs of every kind that are the same function."""
    for pair in SAME:
        for key in _keys(pair.name, pair.applies, count):
            layer = partial(score_same, key, pair.make)
            yield Case(pair.name, key.geometry, str(key), layer)


def subtle(count: int) -> Iterator[Case]:
    """Return about ``count`` pairs of every kind that differ a little."""
    for pair in SUBTLE:
        for key in _keys(pair.name, pair.applies, count):
            yield Case(pair.name, key.geometry, str(key), partial(score_subtle, key, pair.make))


def two_faults(count: int) -> Iterator[Case]:
    """Return random pairs of faults."""
    for key, second, pair in pairs(8 * count):
        name = f"{key.fault} + {second}"
        good, faulty, probe, truths = pair.good, pair.faulty, pair.probe, pair.truths
        score = partial(_pair, name, str(key), good, faulty, probe, truths)
        yield Case("two faults", key.geometry, f"{key} + {second}", score)


def layers_of_models(count: int) -> Iterator[Case]:
    """Return one fault in a layer of a model, twice ``count`` times."""
    for key, case in models(2 * count):
        yield Case(key.fault, key.geometry, str(key), partial(_model, key, case))


SUITES: dict[str, Callable[[int], Iterator[Case]]] = {
    "single": singles,
    "left-out": left_out,
    "unknown": unknowns,
    "same": same,
    "subtle": subtle,
    "pairs": two_faults,
    "models": layers_of_models,
}


def diagnosis_of(
    good: Layer, faulty: Layer, probes: Sequence[Probe], candidates: Sequence[Cause] = CAUSES
) -> Diagnosis:
    """Compare a faulty layer with the good one, on the probes of the case and headwise's own."""
    first, second = ReferenceSubject(faulty), ReferenceSubject(good)
    named = [NamedInputs("the probe of the case", inputs_of(probe)) for probe in probes]
    assert isinstance(good, ReferenceLayer)
    g = good.geometry
    # A fault of masks or of decoding needs the arguments of its own probe.
    if all(probe.mask is None and not probe.steps for probe in probes):
        others = make_probe_inputs((g.embed_dim, g.key_dim), crosses=g.cross)
        named += [other for other in others if _runs(first, other)]
    with torch.no_grad():
        return Comparison(first, second, named, candidates).diagnosis()


def _runs(subject: ReferenceSubject, probe: NamedInputs) -> bool:
    """True if a faulty layer takes inputs of this shape: some take those of their case alone."""
    try:
        subject.record_calls(probe.inputs)
    except RuntimeError:
        return False
    return True


def _named(diagnosis: Diagnosis) -> list[str]:
    assert diagnosis.function is not None
    names = [cause.name for cause in diagnosis.function.causes]
    left = any(not stage.is_explained for stage in diagnosis.function.parted)
    return names + ["unknown"] * (left and bool(names))


def _right_names(truth: Truth) -> tuple[str, ...]:
    """Return the cause, and those that are the same function."""
    return tuple(dict.fromkeys([truth.cause, *truth.equals, *EQUALS.get(truth.cause, ())]))


def _answer(diagnosis: Diagnosis) -> str:
    return " + ".join(_named(diagnosis)) or str(diagnosis.verdict)


def score_single(key: CaseKey, make_case: Callable[[CaseKey], FaultCase] = case_of) -> Scored:
    """Score a fault of one layer, or of several: its cause alone is right."""
    case = make_case(key)
    if not isinstance(case.good, ReferenceLayer):
        return _stack(key, case)
    diagnosis = diagnosis_of(case.good, case.faulty, [case.probe])
    right, names = _right_names(case.truth), _named(diagnosis)
    if key.fault == "dtype only":
        is_right = diagnosis.verdict in (Verdict.TO_ROUNDING, Verdict.SAME)
        return Scored(key.fault, str(key), _answer(diagnosis), is_right, bool(names))
    wrong = bool(names) and names[0] not in right
    others = _wrong_parameters(diagnosis, case.truth)
    is_right = len(names) == 1 and not wrong and not others
    answer = "; ".join([_answer(diagnosis), *others])
    return Scored(key.fault, str(key), answer, is_right, wrong, (right,), tuple(names))


def _wrong_parameters(diagnosis: Diagnosis, truth: Truth) -> list[str]:
    """Return parameters that are not those of the fault, where its own cause was named."""
    assert diagnosis.function is not None
    causes = [cause for cause in diagnosis.function.causes if cause.name == truth.cause]
    return find_wrong_parameters(truth.parameters, causes[0].parameters) if causes else []


def _left_out(key: CaseKey) -> Scored:
    """Score a fault whose cause may not be named: no other may be named in its place.

    Right is also what is the same function by another name: it explains all, and again, with the
    same parameters, on inputs that were drawn anew.
    """
    case = case_of(key)
    out = _right_names(case.truth)
    candidates = [cause for cause in CAUSES if cause.name not in out]
    first, second = (
        diagnosis_of(case.good, case.faulty, [probe], candidates)
        for probe in (case.probe, _draw_anew(case.probe, Draw("inputs", str(key))))
    )
    names = _named(first)
    is_same = bool(names) and "unknown" not in names and _name_the_same(first, second)
    right = not names or is_same
    return Scored(key.fault, str(key), _answer(first), right, not right, by_other_name=is_same)


def _draw_anew(probe: Probe, draw: Draw) -> Probe:
    """Return other tokens for the same mask, positions and calls."""
    source = None if probe.source is None else draw.normal(*probe.source.shape)
    return replace(probe, x=draw.normal(*probe.x.shape), source=source)


def _name_the_same(first: Diagnosis, second: Diagnosis) -> bool:
    assert first.function is not None
    assert second.function is not None
    if _named(first) != _named(second):
        return False
    pairs_of_causes = zip(first.function.causes, second.function.causes, strict=True)
    return all(parameters_agree(a.parameters, b.parameters) for a, b in pairs_of_causes)


def _stack(key: CaseKey, case: FaultCase) -> Scored:
    """Score a fault of several layers."""
    assert isinstance(case.good, LayerStack)
    assert isinstance(case.faulty, LayerStack)
    with torch.no_grad():
        diagnosis = compare_runs(run_of(case.faulty, case.probe), run_of(case.good, case.probe))
    assert diagnosis.model is not None
    names = diagnosis.model.cause_names
    right = _right_names(case.truth)
    is_right = len(names) == 1 and names[0] in right and not diagnosis.model.unexplained_places
    answer = " + ".join(names) or str(diagnosis.verdict)
    wrong = any(name not in right for name in names)
    return Scored(key.fault, str(key), answer, is_right, wrong, (right,), tuple(names))


def score_unknown(key: CaseKey, make_case: Callable[[CaseKey], FaultCase] = case_of) -> Scored:
    """Score a fault without a cause: no cause is right, with its stage and heads."""
    case = make_case(key)
    diagnosis = diagnosis_of(case.good, case.faulty, [case.probe])
    assert diagnosis.function is not None
    stages = [stage.stage for stage in diagnosis.function.parted]
    answer = f"{_answer(diagnosis)} in {', '.join(stages[:2])}"
    at_stage = bool(stages) and stages[0] == case.truth.stage
    heads = diagnosis.function.parted[0].heads if at_stage else None
    at_head = case.truth.heads is None or heads is None or {*case.truth.heads} == {*heads}
    is_right = diagnosis.verdict is Verdict.UNKNOWN and at_stage and at_head
    return Scored(key.fault, str(key), answer, is_right, bool(_named(diagnosis)))


def _keys(name: str, applies: Callable[..., bool], count: int) -> list[CaseKey]:
    fitting = [g for g in GEOMETRIES if applies(g)]
    kinds = [(g, kind, seed) for seed in range(count) for g in fitting for kind in KINDS]
    return [CaseKey(name, g.name, kind, seed) for g, kind, seed in kinds[:count]]


def score_same(
    key: CaseKey,
    make: Callable[[ReferenceLayer, Draw], ReferenceLayer],
    make_layer: Callable[[CaseKey], ReferenceLayer] = layer_for,
) -> Scored:
    """Score a layer and its equal: a verdict of no difference is right."""
    good = make_layer(key)
    probe = default_probe(good.geometry, Draw("probe", str(key)))
    diagnosis = diagnosis_of(good, make(good, Draw("same", str(key))), [probe])
    return Scored(key.fault, str(key), _verdict(diagnosis), diagnosis.verdict.is_same)


def score_subtle(
    key: CaseKey,
    make: Callable[[ReferenceLayer, Draw], tuple[ReferenceLayer, ReferenceLayer]],
    make_layer: Callable[[CaseKey], ReferenceLayer] = layer_for,
) -> Scored:
    """Score a small difference: a verdict of a difference is right."""
    good, faulty = make(make_layer(key), Draw("subtle", str(key)))
    probe = default_probe(good.geometry, Draw("probe", str(key)))
    diagnosis = diagnosis_of(good, faulty, [probe])
    is_right = not diagnosis.verdict.is_same
    return Scored(key.fault, str(key), f"{_verdict(diagnosis)}: {_answer(diagnosis)}", is_right)


def _verdict(diagnosis: Diagnosis) -> str:
    return str(diagnosis.verdict)


def _pair(
    name: str,
    key: str,
    good: ReferenceLayer,
    faulty: ReferenceLayer,
    probe: Probe,
    truths: tuple[Truth, Truth],
) -> Scored:
    diagnosis = diagnosis_of(good, faulty, [probe])
    names = _named(diagnosis)
    rights = [_right_names(truth) for truth in truths]
    first, second = rights
    orders = [(first, second), (second, first)]
    is_right = len(names) == 2 and any(names[0] in a and names[1] in b for a, b in orders)
    wrong = any(each not in (*first, *second) for each in names if each != "unknown")
    answer = f"{name}: {_answer(diagnosis)}"
    both = (first, second)
    return Scored("two faults", f"{key} + {name}", answer, is_right, wrong, both, tuple(names))


def _model(key: CaseKey, case: FaultCase) -> Scored:
    assert isinstance(case.good, LayerStack)
    assert isinstance(case.faulty, LayerStack)
    with torch.no_grad():
        diagnosis = compare_runs(run_of(case.faulty, case.probe), run_of(case.good, case.probe))
    assert diagnosis.model is not None
    parted = diagnosis.model.differing_layers
    names = [cause.name for layer in parted for cause in layer.comparison.causes]
    stages = [stage.stage for layer in parted[:1] for stage in layer.comparison.parted]
    answer = f"{', '.join(layer.name for layer in parted)}: {', '.join(stages[:1])}: {names}"
    right = _right_names(case.truth)
    is_right = (
        [layer.name for layer in parted] == [f"layers.{case.truth.layer}"]
        and stages[0] == case.truth.stage
        and len(names) == 1
        and names[0] in right
    )
    wrong = any(name not in right for name in names)
    answer = f"{key.fault}: {answer}"
    fault = "one layer of a model"
    return Scored(fault, str(key), answer, is_right, wrong, (right,), tuple(names))
