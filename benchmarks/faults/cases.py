"""All cases of the fault bench, by fault, geometry, kind of weights and seed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import FaultCase
from benchmarks.faults.geometries import (
    GEOMETRIES,
    KINDS,
    Kind,
    layer_of,
    minilm_layer,
    tiny_layer,
)
from benchmarks.faults.injectors import INJECTORS
from benchmarks.faults.injectors.injector import Injector
from benchmarks.faults.reference_layer import ReferenceLayer
from benchmarks.faults.unknown import MECHANISMS

REAL = {"minilm": minilm_layer, "tiny": tiny_layer}


@dataclass(frozen=True)
class CaseKey:
    """Names that make a case again: ``weights`` is a kind of random weights, or "real"."""

    fault: str
    geometry: str
    weights: str
    seed: int

    def __str__(self) -> str:
        return f"{self.fault}:{self.geometry}:{self.weights}:{self.seed}"

    @classmethod
    def parse(cls, text: str) -> CaseKey:
        """Return the key that prints as ``text``."""
        fault, geometry, weights, seed = text.rsplit(":", 3)
        return cls(fault, geometry, weights, int(seed))


def injector_of(fault: str) -> Injector:
    """Return the injector of a fault, known or unknown to the catalogue."""
    return next(each for each in (*INJECTORS, *MECHANISMS) if each.name == fault)


def layer_for(key: CaseKey) -> ReferenceLayer:
    """Return the good layer of a key."""
    if key.weights == "real":
        name, index = key.geometry.split("-")
        return REAL[name](int(index))
    geometry = next(each for each in GEOMETRIES if each.name == key.geometry)
    kind: Kind = "init-like" if key.weights == "init-like" else "trained-like"
    return layer_of(geometry, kind, Draw("weights", key.geometry, key.weights, key.seed))


def case_of(key: CaseKey) -> FaultCase:
    """Return the case of a key."""
    return injector_of(key.fault).inject(layer_for(key), Draw("fault", str(key)))


def keys(
    injectors: Iterable[Injector] = INJECTORS, seeds: Iterable[int] = range(4)
) -> Iterator[CaseKey]:
    """Return the keys of every fault on every random geometry to which it applies."""
    for injector in injectors:
        for geometry in GEOMETRIES:
            if injector.applies(geometry):
                for kind in KINDS:
                    for seed in seeds:
                        yield CaseKey(injector.name, geometry.name, kind, seed)


def real_keys(
    layers: Iterable[str], injectors: Iterable[Injector] = INJECTORS, seed: int = 0
) -> Iterator[CaseKey]:
    """Return the keys of every fault on real layers, named such as "minilm-3" and "tiny-0"."""
    for name in layers:
        geometry = layer_for(CaseKey("", name, "real", seed)).geometry
        for injector in injectors:
            if injector.applies(geometry):
                yield CaseKey(injector.name, name, "real", seed)


def enough_keys(injector: Injector, count: int = 20) -> list[CaseKey]:
    """Return at least ``count`` keys of a fault, over its geometries in turn."""
    chosen: list[CaseKey] = []
    seed = 0
    while len(chosen) < count:
        chosen += keys([injector], [seed])
        seed += 1
    return chosen
