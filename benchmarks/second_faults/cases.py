"""All cases of the second set, by fault or pair, geometry, kind of weights and seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from benchmarks.faults.cases import CaseKey
from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import FaultCase
from benchmarks.faults.geometries import KINDS, Kind, layer_of
from benchmarks.faults.geometry import Geometry
from benchmarks.faults.injectors import INJECTORS
from benchmarks.faults.injectors.injector import Injector
from benchmarks.faults.reference_layer import ReferenceLayer
from benchmarks.faults.same import SAME, SamePair
from benchmarks.faults.subtle import SUBTLE, SubtlePair
from benchmarks.second_faults.geometries import SECOND_GEOMETRIES
from benchmarks.second_faults.mechanisms import SECOND_MECHANISMS
from benchmarks.second_faults.variants import VARIANTS

# Faults of several layers do not depend on the geometry, so the first set has all of them.
REPEATED = tuple(injector for injector in INJECTORS if injector.family != "layers")
PAIRS: tuple[SamePair | SubtlePair, ...] = (*SAME, *SUBTLE)


def injector_of(fault: str) -> Injector:
    """Return the injector of a fault, known or unknown to the catalogue."""
    every = (*REPEATED, *VARIANTS, *SECOND_MECHANISMS)
    return next(each for each in every if each.name == fault)


def layer_for(key: CaseKey) -> ReferenceLayer:
    """Return the good layer of a key."""
    geometry = next(each for each in SECOND_GEOMETRIES if each.name == key.geometry)
    kind: Kind = "init-like" if key.weights == "init-like" else "trained-like"
    words = ("second set", "weights", key.geometry, key.weights, key.seed)
    return layer_of(geometry, kind, Draw(*words))


def case_of(key: CaseKey) -> FaultCase:
    """Return the case of a key."""
    draw = Draw("second set", "fault", str(key))
    return injector_of(key.fault).inject(layer_for(key), draw)


def fault_keys(injectors: Iterable[Injector], seeds: Sequence[int] = (0,)) -> Iterator[CaseKey]:
    """Return the keys of every fault on every geometry to which it applies."""
    for injector in injectors:
        yield from _keys(injector.name, injector.applies, seeds)


def pair_keys(pairs: Iterable[SamePair | SubtlePair]) -> Iterator[CaseKey]:
    """Return a key for every pair and geometry to which it applies; kinds of weights take turns."""
    for pair in pairs:
        keys = list(_keys(pair.name, pair.applies, [0]))
        for place, key in enumerate(keys[:: len(KINDS)]):
            turn = (PAIRS.index(pair) + place) % len(KINDS)
            yield CaseKey(key.fault, key.geometry, KINDS[turn], key.seed)


def _keys(
    name: str, applies: Callable[[Geometry], bool], seeds: Sequence[int]
) -> Iterator[CaseKey]:
    for geometry in SECOND_GEOMETRIES:
        if applies(geometry):
            for seed in seeds:
                for kind in KINDS:
                    yield CaseKey(name, geometry.name, kind, seed)
