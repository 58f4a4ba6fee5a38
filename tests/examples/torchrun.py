"""Programs of examples/, run as their first lines say, where nothing else is installed."""

from __future__ import annotations

import os
import re
import subprocess

from tests.examples.environment import python_with
from tests.root import ROOT

SECONDS = 240


def torchrun(program: str, *arguments: str, processes: int = 2) -> str:
    """Run ``torchrun --nproc-per-node=N examples/PROGRAM``; return what it prints.

    The environment has the extra that the program names as headwise[EXTRA], or none.
    """
    text = (ROOT / "examples" / program).read_text("utf-8")
    extra = re.search(r"headwise\[(\w+)\]", text)
    command = [python_with(extra[1] if extra else ""), "-m", "torch.distributed.run"]
    command += ["--standalone", f"--nproc-per-node={processes}", f"examples/{program}", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, env=environment
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout
