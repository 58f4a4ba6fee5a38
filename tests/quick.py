"""Which cases of a test `make test` runs, and which `make check`.

`make test` runs what has no mark, `make check` also what is slow, and `make suite` what is extra:
further families, dtypes and compilers of a behaviour of which `make check` runs one.
"""

from collections.abc import Iterable
from typing import Any

import pytest


def others_slow(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Parameters of a test, of which `make test` runs the kept ones alone, some by their name.

    Where none is given, the first is kept.
    """
    cases = list(cases)
    return [_mark(case, "" if is_kept else "slow") for case, is_kept in _choose(cases, kept)]


def others_extra(cases: Iterable[Any], *kept: Any, quick: Iterable[Any] = ()) -> list[Any]:
    """Parameters of a test, of which `make suite` alone runs all but the kept and the quick ones.

    `make test` runs the quick ones. Where none is given, the first is kept.
    """
    cases, quick = list(cases), tuple(quick)
    are_quick = (
        [is_quick for _, is_quick in _choose(cases, quick)] if quick else [False] * len(cases)
    )
    return [
        _mark(case, "" if is_quick else "slow" if is_kept else "extra")
        for (case, is_kept), is_quick in zip(_choose(cases, kept + quick), are_quick, strict=True)
    ]


def _choose(cases: list[Any], chosen: tuple[Any, ...]) -> list[tuple[Any, bool]]:
    """Each case, and whether it is one of the chosen, by itself or by its name; or the first."""
    if not chosen:
        return [(case, place == 0) for place, case in enumerate(cases)]
    names, chosen = [_name(case) for case in cases], tuple(map(_name, chosen))
    assert all(each in names for each in chosen)
    return [(case, name in chosen) for case, name in zip(cases, names, strict=True)]


def _mark(case: Any, mark: str) -> Any:
    if not mark:
        return case
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=getattr(pytest.mark, mark))


def _name(case: Any) -> Any:
    return getattr(case, "name", case)
