"""Which cases of a test `make test` runs."""

from collections.abc import Iterable
from typing import Any

import pytest


def others_slow(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Parameters of a test, of which `make test` runs the kept ones alone, some by their name.

    Where none is given, the first is kept.
    """
    cases = list(cases)
    names = [getattr(case, "name", case) for case in cases]
    kept = kept or (names[0],)
    assert all(name in names for name in kept)
    return [
        case
        if name in kept
        else pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.slow)
        for case, name in zip(cases, names, strict=True)
    ]
