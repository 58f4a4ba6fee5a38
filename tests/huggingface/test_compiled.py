"""Models compiled: the tests of compiled.py, and export."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.root import ROOT


@pytest.mark.slow
def test_compiled() -> None:
    # The annotations of src are checked in this run, and a compiler cannot look through the
    # checks: the tests of compiled.py run beside it, without them.
    file = Path(__file__).with_name("compiled.py")
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=--import-mode=importlib", file]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "17 passed" in done.stdout
