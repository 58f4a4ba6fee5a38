"""Two faults in one layer, and one fault in one layer of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from benchmarks.faults.cases import CaseKey, injector_of, layer_for
from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import (
    FaultCase,
    LayerStack,
    Probe,
    Truth,
    distance,
)
from benchmarks.faults.geometries import GEOMETRIES, KINDS
from benchmarks.faults.injectors import INJECTORS
from benchmarks.faults.injectors.layers import stack_of
from benchmarks.faults.reference_layer import ReferenceLayer

# No second fault can be put on these: they have several layers, two layers with an adapter, or
# a dtype of their own.
ALONE = {"layers", "adapters", "dtype"}
LEAST = 1e-6  # each fault of a pair moves the output at least by this share


@dataclass(frozen=True)
class PairCase:
    """A layer with two faults; ``truths`` has them in the order in which they were put in."""

    good: ReferenceLayer
    faulty: ReferenceLayer
    probe: Probe
    truths: tuple[Truth, Truth]


def pair_of(first: CaseKey, second: str) -> PairCase | None:
    """Return the case of ``first`` with another fault, or None where the two exclude each other.

    Two faults exclude each other if they are of one family or have one name for the same
    function, need different probes, replace the same stage, or if one hides the other. A bias
    can go missing only as the second fault.
    """
    layer = layer_for(first)
    injectors = injector_of(first.fault), injector_of(second)
    families = {each.family for each in injectors}
    if families & ALONE or len(families) == 1 or first.fault == "bias missing":
        return None
    case = injectors[0].inject(layer, Draw("fault", str(first)))
    if not isinstance(case.faulty, ReferenceLayer):
        return None
    if not injectors[1].applies(case.faulty.geometry):
        return None
    other = injectors[1].inject(case.faulty, Draw("second fault", second, str(first)))
    truths = case.truth, other.truth
    if not isinstance(other.faulty, ReferenceLayer) or _one_function(*truths):
        return None
    first_stages, all_stages = case.faulty.replaced, other.faulty.replaced
    if any(all_stages[name] is not function for name, function in first_stages.items()):
        return None
    probe = _shared_probe(case.probe, other.probe)
    exchanged = "batch and sequence exchanged" in (first.fault, second)
    if probe is None or (exchanged and _special(probe)):
        return None
    if _hidden(probe, layer, case.faulty, other.faulty):
        return None
    return PairCase(layer, other.faulty, probe, truths)


def _one_function(first: Truth, second: Truth) -> bool:
    """Return True if the two faults have a name in common."""
    names = [{truth.cause, *truth.equals} for truth in (first, second)]
    return bool(names[0] & names[1])


def _special(probe: Probe) -> bool:
    return probe.mask is not None or probe.positions is not None or bool(probe.steps)


def _shared_probe(first: Probe, second: Probe) -> Probe | None:
    """Return the probe that shows both faults."""
    if _special(first) and _special(second):
        return None
    return first if _special(first) else second


def _hidden(probe: Probe, *layers: ReferenceLayer) -> bool:
    """Return True if a step from one layer to the next leaves the outputs equal, or gives NaN."""
    outputs = [probe.run(layer)[-1]["output"] for layer in layers]
    return any(
        not LEAST < distance(left, right) < float("inf") for left, right in pairwise(outputs)
    )


def pairs(count: int = 150, seed: int = 0) -> Iterator[tuple[CaseKey, str, PairCase]]:
    """Return random pairs of different faults, with the key and the name that make them again."""
    draw, made = Draw("pairs", seed), 0
    while made < count:
        geometry = draw.choice(GEOMETRIES)
        first, second = draw.choice(INJECTORS), draw.choice(INJECTORS)
        if first.name == second.name or not first.applies(geometry):
            continue
        key = CaseKey(first.name, geometry.name, draw.choice(KINDS), draw.integer(0, 1000))
        case = pair_of(key, second.name)
        if case is not None:
            made += 1
            yield key, second.name, case


def model_case(key: CaseKey, layers: int, index: int) -> FaultCase | None:
    """Return a model of ``layers`` layers with the fault of ``key`` in layer ``index``.

    The result is None where the fault needs calls with a cache, or is one of several layers.
    """
    layer, injector = layer_for(key), injector_of(key.fault)
    case = injector.inject(layer, Draw("fault", str(key)))
    if not isinstance(case.good, ReferenceLayer) or not isinstance(case.faulty, ReferenceLayer):
        return None
    if case.probe.steps or case.truth.cause == "dtype only":
        return None
    others = stack_of(layer, Draw("others", str(key)), layers)[1:]
    good, faulty = (
        LayerStack([*others[:index], chosen, *others[index:]])
        for chosen in (case.good, case.faulty)
    )
    return FaultCase(good, faulty, case.probe, replace(case.truth, layer=index))


def models(count: int = 40, seed: int = 0) -> Iterator[tuple[CaseKey, FaultCase]]:
    """Return random faults in one layer of models with 8 to 24 layers."""
    draw, made = Draw("models", seed), 0
    while made < count:
        geometry, injector = draw.choice(GEOMETRIES), draw.choice(INJECTORS)
        if not injector.applies(geometry):
            continue
        layers = draw.integer(8, 25)
        key = CaseKey(injector.name, geometry.name, "trained-like", draw.integer(0, 1000))
        case = model_case(key, layers, draw.integer(0, layers))
        if case is not None:
            made += 1
            yield key, case
