"""Tests in an interpreter of their own, in which no annotation is checked.

A compiler cannot look through the checks of this run, and is to see what users have.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.root import ROOT


def assert_passed_apart(*tests: Path | str, count: int, chosen: str = "") -> None:
    """Run so many tests of files or node ids; ``chosen`` is an expression of pytest's -k."""
    command = [sys.executable, "-m", "pytest", "-q", "--show-capture=no", "-k", chosen]
    command += ["-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib", *map(str, tests)]
    unchecked = os.environ | {"JAXTYPING_DISABLE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=unchecked, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
    assert f"\n{count} passed" in done.stdout
