"""The layer compiled.

The annotations of src are checked in this run, and a compiler cannot look through the checks: the
tests of compiled.py run beside it, without them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.apart import assert_passed_apart

FILE = Path(__file__).with_name("compiled.py")


@pytest.mark.parametrize(
    ("chosen", "count"),
    [
        ("test_training and causal", 1),
        pytest.param("test_training and not causal", 5, marks=pytest.mark.slow),
        pytest.param("not test_training and not test_inductor", 2, marks=pytest.mark.slow),
    ],
)
def test_compiled(chosen: str, count: int) -> None:
    assert_passed_apart(FILE, count, chosen=chosen)


@pytest.mark.slow
@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="inductor needs a C++ compiler"
)
def test_compiled_by_inductor() -> None:
    assert_passed_apart(FILE, 1, chosen="test_inductor")
