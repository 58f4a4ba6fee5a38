"""The example that scans a corpus: every text has a part, and the best heads are printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwise.scanning.result import HeadScan
from tests.examples.torchrun import torchrun


@pytest.mark.slow
def test_the_corpus_is_in_the_folder(tmp_path: Path) -> None:
    first, *heads = torchrun("scan_corpus.py", str(tmp_path)).splitlines()
    scan = HeadScan.load(tmp_path / "scan.safetensors")
    assert first == f"{scan.sequences} texts, {scan.tokens:,} tokens, 2 ranks"
    assert scan.sequences == len(list((tmp_path / "parts").iterdir())) > 2
    best = scan.top("previous_token", 1)[0]
    share = f"{100 * best.value:.0f} % on the token before"
    assert heads[0] == f"{best.layer}, head {best.head}: {share}"
