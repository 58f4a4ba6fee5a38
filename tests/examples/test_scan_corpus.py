"""The example that scans a corpus with dask: a worker is killed, and the bytes are the same."""

from pathlib import Path

import pytest

from headwise.scanning import HeadScan
from tests.examples.torchrun import run_example


@pytest.mark.extra
def test_the_merged_scan_has_the_bytes_of_one_process(tmp_path: Path) -> None:
    first, second = run_example("scan_corpus.py", str(tmp_path)).splitlines()
    scan = HeadScan.load(tmp_path / "scans" / "scan.safetensors")
    assert first == f"16 texts in 4 parts, {scan.tokens:,} tokens, one worker killed"
    assert second == "the bytes of one process: the same"
    assert scan.sequences == len(list((tmp_path / "scans" / "parts").glob("[0-9]*"))) == 16
