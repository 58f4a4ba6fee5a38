"""The layer compiled.

The annotations of src are checked in this run, and a compiler cannot look through the checks: the
tests of compiled.py run beside it, without them.
"""

import shutil
from pathlib import Path

import pytest

from tests.apart import assert_passed_apart

FILE = Path(__file__).with_name("compiled.py")


@pytest.mark.extra
@pytest.mark.parametrize(
    ("chosen", "count"), [("decoding_step or packed", 2), ("test_training and not causal", 6)]
)
def test_compiled(chosen: str, count: int) -> None:
    """All but the training with a causal mask, which tests/layers/test_traced.py runs."""
    assert_passed_apart(FILE, count=count, chosen=chosen)


@pytest.mark.extra
@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="inductor needs a C++ compiler"
)
def test_compiled_by_inductor() -> None:
    assert_passed_apart(FILE, count=1, chosen="test_inductor")
