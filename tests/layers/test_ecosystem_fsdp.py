"""The layer under FSDP2, and as torch's tensor parallelism splits it, in two processes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.root import ROOT

SECONDS = 240  # a process that waits for another one waits 60

NEEDED = torch.distributed.is_available() and torch.distributed.is_gloo_available()


@pytest.mark.slow
@pytest.mark.skipif(not NEEDED, reason="this torch has no gloo to talk over")
def test_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.layers.sharded", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-6000:]
    checks = ["training", "training_of_units", "readings", "tensor_parallel", "from_meta"]
    assert done.stdout.split() == checks
