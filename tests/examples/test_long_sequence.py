"""The example of a long sequence over two processes: its rows, memory and bytes."""

import re

import pytest

from tests.examples.torchrun import torchrun

pytestmark = pytest.mark.extra


def test_rows_are_those_of_one_process() -> None:
    printed = torchrun("long_sequence.py")
    assert "by heads: each rank gets whole heads" in printed
    (error,) = re.findall(r"64 rows on one process: (\S+) apart", printed)
    assert float(error) < 1e-5
    (peak,) = re.findall(r"peak memory of both passes: (\d+) MB", printed)
    assert int(peak) < 400
    assert "where the weights would be 34 GB" in printed
    assert re.search(r"sent +17 MB forward, 17 MB backward", printed)
    assert "of all 65536 queries" in printed
