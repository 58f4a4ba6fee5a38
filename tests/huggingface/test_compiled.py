"""Models compiled: the tests of compiled.py, and export."""

from pathlib import Path

import pytest

from tests.apart import assert_passed_apart
from tests.quick import others_extra

FIRST = "static_cache or not_written"


@pytest.mark.parametrize(("chosen", "count"), others_extra([(FIRST, 2), (f"not ({FIRST})", 10)]))
def test_compiled(chosen: str, count: int) -> None:
    assert_passed_apart(Path(__file__).with_name("compiled.py"), count=count, chosen=chosen)
