"""Programs of examples/, run as their first lines say."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.root import ROOT

SECONDS = 240


def torchrun(program: str, *arguments: str, processes: int = 2) -> str:
    """Run ``torchrun --nproc-per-node=N examples/PROGRAM``; return what it prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", f"examples/{program}", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, env=environment
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout
