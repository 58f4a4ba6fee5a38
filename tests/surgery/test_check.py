"""The check of a written folder, whose new process is a stub here."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from headwise.errors import CheckpointError
from headwise.surgery import check_folder, cut_model, folders, write
from tests.surgery.families import FAMILIES, inputs_of, output_of, without


def give(monkeypatch: pytest.MonkeyPatch, output: Tensor) -> None:
    """Let the new process give this output."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        save_file({"output": output}, command[-1])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(folders.subprocess, "run", run)


def test_outputs_within_the_budget_pass_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FAMILIES["llama"]()
    model.save_pretrained(tmp_path / "source")
    cut = without(model, [2, 3])
    write(cut, tmp_path / "source", tmp_path / "new")
    made, inputs = cut_model(cut, model), inputs_of(model)
    expected = output_of(made)
    give(monkeypatch, expected.clone())
    assert check_folder(tmp_path / "new", made, inputs) == 0
    ulp = torch.finfo(torch.float32).eps * float(expected.abs().max())
    give(monkeypatch, expected + ulp)
    assert 0 < check_folder(tmp_path / "new", made, inputs) < 2 * ulp
    for wrong in (output_of(model), expected[:1]):
        give(monkeypatch, wrong.clone())
        with pytest.raises(CheckpointError, match="gives other outputs than the model in memory"):
            check_folder(tmp_path / "new", made, inputs)
