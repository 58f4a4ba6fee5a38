"""Print how often the cause of a fault is named: ``python -m benchmarks.compare --help``."""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import torch

from benchmarks.compare.subjects import model_of, record
from benchmarks.faults.cases import CaseKey, case_of, enough_keys
from benchmarks.faults.injectors import INJECTORS
from benchmarks.faults.reference_layer import ReferenceLayer
from benchmarks.faults.unknown import MECHANISMS
from headwise.diagnosis.causes.all_causes import CAUSES
from headwise.diagnosis.search import Search, search

UNKNOWN = "unknown cause"
NOTHING = "no difference"


def keys_of(fault: str | None, geometry: str | None, count: int) -> Iterator[CaseKey]:
    """Return ``count`` cases of each fault that is asked for, over its geometries in turn."""
    for injector in (*INJECTORS, *MECHANISMS):
        if fault is None or fault == injector.name:
            for key in enough_keys(injector, count)[: None if geometry else count]:
                if geometry is None or geometry == key.geometry:
                    yield key


def run(key: CaseKey) -> tuple[set[str], Search | None]:
    """Return the names that are right, and the result; None where a case has other subjects."""
    case = case_of(key)
    truth = {case.truth.cause, *case.truth.equals}
    if not isinstance(case.good, ReferenceLayer):
        return truth, None
    model = model_of(case.good)
    with torch.no_grad():
        return truth, search(model, record(case.faulty, case.probe), CAUSES)


def named(result: Search | None) -> str:
    """Return the cause that is named first."""
    if result is None:
        return "not run"
    if not result.gaps.parted:
        return NOTHING
    if not result.causes:
        return UNKNOWN
    return result.causes[0].cause.name + ("" if result.is_complete else " and unknown")


def is_right(key: CaseKey, truth: set[str], result: Search | None) -> bool:
    """True if a right cause is named first, alone; unknown where the mechanism is unknown."""
    if result is None:
        return False
    if key.fault.startswith("unknown"):
        return not result.causes and bool(result.gaps.parted)
    return named(result) in truth and len(result.causes) == 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the cases and print a line for each fault, and what was named in its place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", help="the name of one fault")
    parser.add_argument("--geometry", help="the name of one geometry")
    parser.add_argument("--count", type=int, default=20, help="cases of each fault")
    parser.add_argument("--case", help="one case, as its key is printed")
    parser.add_argument("--verbose", action="store_true", help="list the cases that were missed")
    options = parser.parse_args(arguments)
    keys = keys_of(options.fault, options.geometry, options.count)
    keys = iter([CaseKey.parse(options.case)]) if options.case else keys
    scores: dict[str, list[bool]] = defaultdict(list)
    instead: dict[str, Counter[str]] = defaultdict(Counter)
    for key in keys:
        start = time.perf_counter()
        truth, result = run(key)
        right = is_right(key, truth, result)
        scores[key.fault].append(right)
        if not right:
            instead[key.fault][named(result)] += 1
            if options.verbose:
                seconds = time.perf_counter() - start
                print(f"  {key}: {named(result)} ({seconds:.1f} s)")
    for fault, rights in scores.items():
        others = ", ".join(f"{name} {n}" for name, n in instead[fault].most_common(4))
        print(f"{sum(rights):4} of {len(rights):3}  {fault:48} {others}", flush=True)
    total = [right for rights in scores.values() for right in rights]
    print(f"{sum(total)} of {len(total)} cases: {sum(total) / max(len(total), 1):.1%}")


if __name__ == "__main__":
    main()
