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
    return _mark(cases, slow=_others(cases, kept))


def others_extra(cases: Iterable[Any], *kept: Any, quick: Iterable[Any] = ()) -> list[Any]:
    """Parameters of a test, of which `make suite` alone runs all but the kept and the quick ones.

    `make test` runs the quick ones. Where none is given, the first is kept.
    """
    cases, quick = list(cases), tuple(quick)
    extra = _others(cases, kept + quick)
    slow = [name for name in map(_name, cases) if name not in extra and name not in quick]
    return _mark(cases, slow=slow, extra=extra)


def _others(cases: list[Any], kept: tuple[Any, ...]) -> list[Any]:
    names = [_name(case) for case in cases]
    kept = kept or (names[0],)
    assert all(name in names for name in kept)
    return [name for name in names if name not in kept]


def _mark(cases: list[Any], **names_of: list[Any]) -> list[Any]:
    marked = []
    for case in cases:
        marks = [
            getattr(pytest.mark, mark) for mark, names in names_of.items() if _name(case) in names
        ]
        values = case if isinstance(case, tuple) else (case,)
        marked.append(pytest.param(*values, marks=marks) if marks else case)
    return marked


def _name(case: Any) -> Any:
    return getattr(case, "name", case)
