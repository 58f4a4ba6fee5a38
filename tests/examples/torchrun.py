"""Programs of examples/, run as their first lines say, where nothing else is installed."""

import os
import re
import subprocess
from collections.abc import Sequence

from tests.examples.environment import python_with
from tests.root import ROOT

SECONDS = 240


def torchrun(program: str, *arguments: str, processes: int = 2) -> str:
    """Run ``torchrun --nproc-per-node=N examples/PROGRAM``; return what it prints."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return run_example(program, *arguments, launcher=launcher)


def run_example(program: str, *arguments: str, launcher: Sequence[str] = ()) -> str:
    """Run an example; return what it prints.

    The environment has what the program names as ``pip install 'headwise[EXTRA]' PACKAGE``.
    """
    text = (ROOT / "examples" / program).read_text("utf-8")
    named = re.search(r"pip install 'headwise\[(\w+)\]'(.*)", text)
    extra, packages = (named[1], named[2].split()) if named else ("", [])
    command = [python_with(extra, *packages), *launcher, f"examples/{program}", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, env=environment
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout
