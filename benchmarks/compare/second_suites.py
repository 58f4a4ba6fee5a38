"""Suites of the second set, by kind, with the scores of the first set's suites."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import groupby, islice

from benchmarks.compare.suites import (
    Case,
    Scored,
    score_same,
    score_single,
    score_subtle,
    score_unknown,
)
from benchmarks.faults.cases import CaseKey
from benchmarks.faults.same import SAME
from benchmarks.faults.subtle import SUBTLE
from benchmarks.second_faults.cases import REPEATED, case_of, fault_keys, layer_for, pair_keys
from benchmarks.second_faults.mechanisms import SECOND_MECHANISMS
from benchmarks.second_faults.variants import VARIANTS


def repeated(count: int) -> Iterator[Case]:
    """Return at most ``count`` cases of every fault of the first set."""
    return _cases(fault_keys(REPEATED), score_single, count)


def variants(count: int) -> Iterator[Case]:
    """Return at most ``count`` cases of every new single fault."""
    return _cases(fault_keys(VARIANTS), score_single, count)


def second_unknowns(count: int) -> Iterator[Case]:
    """Return at most ``count`` cases of every new mechanism."""
    return _cases(fault_keys(SECOND_MECHANISMS), score_unknown, count)


def second_same(count: int) -> Iterator[Case]:
    """Return at most ``count`` cases of every pair that is the same function."""
    makers = {pair.name: pair.make for pair in SAME}
    for key in _first(pair_keys(SAME), count):
        score = partial(score_same, key, makers[key.fault], layer_for)
        yield Case(key.fault, key.geometry, str(key), score)


def second_subtle(count: int) -> Iterator[Case]:
    """Return at most ``count`` cases of every pair that differs a little."""
    makers = {pair.name: pair.make for pair in SUBTLE}
    for key in _first(pair_keys(SUBTLE), count):
        score = partial(score_subtle, key, makers[key.fault], layer_for)
        yield Case(key.fault, key.geometry, str(key), score)


def _cases(keys: Iterable[CaseKey], score: Callable[..., Scored], count: int) -> Iterator[Case]:
    for key in _first(keys, count):
        yield Case(key.fault, key.geometry, str(key), partial(score, key, case_of))


def _first(keys: Iterable[CaseKey], count: int) -> Iterator[CaseKey]:
    """Return the first ``count`` keys of each fault."""
    for _, group in groupby(keys, key=lambda key: key.fault):
        yield from islice(group, count)


SECOND_SUITES: dict[str, Callable[[int], Iterator[Case]]] = {
    "second: repeated faults": repeated,
    "second: variants": variants,
    "second: unknown": second_unknowns,
    "second: same": second_same,
    "second: subtle": second_subtle,
}
