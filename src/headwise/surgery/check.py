"""Check of a written folder: its outputs in a new process beside those of the model in memory."""

from __future__ import annotations

import copy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headwise.errors import CheckpointError
from headwise.function.budget import Budget
from headwise.surgery.folders import read_form

# No name of headwise: what loads a folder of the forms "plain" and "full" is transformers alone.
PLAIN = """
def load(folder, kind, dtype):
    import transformers
    options = {"dtype": dtype, "local_files_only": True, "output_loading_info": True}
    model, info = getattr(transformers, kind).from_pretrained(folder, **options)
    wrong = {name: sorted(map(str, names)) for name, names in info.items() if names}
    assert not wrong, f"transformers reports {wrong}"
    return model
"""
HEADWISE = """
def load(folder, kind, dtype):
    import headwise.surgery
    return headwise.surgery.load(folder).to(dtype)
"""
RUN = """
import sys, torch
from safetensors.torch import load_file, save_file
folder, kind, dtype, given, made = sys.argv[1:]
model = load(folder, kind, getattr(torch, dtype)).eval()
with torch.no_grad():
    output = model(**load_file(given))[0]
save_file({"output": output.contiguous()}, made)
"""


def check_folder(folder: str | Path, model: Any, inputs: Mapping[str, Tensor]) -> float:
    """Compare a written folder with the cut model in memory, and return the largest difference.

    A new process loads the folder, by plain transformers unless its form is "headwise".

    Args:
        folder: of `headwise.surgery.write`.
        model: the same cut in memory: `headwise.surgery.cut_model`.
        inputs: arguments of the model, by name.

    Raises:
        CheckpointError: the process fails, or its outputs differ by more than the error budget.
    """
    folder = Path(folder)
    script = (HEADWISE if read_form(folder) == "headwise" else PLAIN) + RUN
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory() as made:
        given, output = Path(made, "inputs.safetensors"), Path(made, "output.safetensors")
        save_file({name: x.detach().cpu().contiguous() for name, x in inputs.items()}, given)
        arguments = [str(folder), type(model).__name__, dtype, str(given), str(output)]
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise _differs(folder, f"cannot be loaded: {done.stderr.strip()[-300:]}")
        stored = load_file(output)["output"]
    with torch.no_grad():
        expected = model(**inputs)[0]
    if torch.equal(stored, expected):
        return 0.0
    verdict = output_budget(model, inputs).check(stored) if stored.shape == expected.shape else None
    if not verdict:
        reason = verdict or f"an output {tuple(stored.shape)}, not {tuple(expected.shape)}"
        raise _differs(folder, f"gives other outputs than the model in memory: {reason}")
    return float((stored.double() - expected.double()).abs().max())


def output_budget(model: Any, inputs: Mapping[str, Tensor]) -> Budget:
    """Return the error that every honest way to the model's output may have."""
    names = [name for name, _ in model.named_parameters()]

    def output(*given: Tensor) -> Tensor:
        wide = copy.deepcopy(model).to(given[0].dtype)
        state = dict(zip(names, given, strict=True))
        cast = {n: x.to(given[0].dtype) if x.is_floating_point() else x for n, x in inputs.items()}
        result: Tensor = torch.func.functional_call(wide, state, (), cast)[0]
        return result

    with torch.no_grad():
        return Budget.for_function(output, *(x.detach() for x in model.parameters()))


def _differs(folder: Path, saw: str) -> CheckpointError:
    return CheckpointError(
        saw=f"{folder} {saw}",
        needed="a folder that gives the outputs of the cut model",
        do="remove the folder, and write it again",
    )
