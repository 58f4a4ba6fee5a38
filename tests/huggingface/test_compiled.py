"""Models compiled: the tests of compiled.py, and export."""

from pathlib import Path

import pytest

from tests.apart import assert_passed_apart


@pytest.mark.slow
def test_compiled() -> None:
    assert_passed_apart(Path(__file__).with_name("compiled.py"), count=12)
