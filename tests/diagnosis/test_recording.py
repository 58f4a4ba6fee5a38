"""Recorded activations: written by a recorder, read back, and compared."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from headwise import Attention, compare
from headwise.diagnosis.subjects.recording import record_activations
from headwise.errors import OptionError, ShapeError
from headwise.identify.results import Verdict

WIDTH, HEADS = 40, 5


def recorded(layer: Attention, path: Path) -> Path:
    x = torch.randn(2, 7, WIDTH)
    parts: dict[str, nn.Module] = {"q": layer.q_proj, "k": layer.k_proj, "v": layer.v_proj}
    record_activations(path, lambda: layer(x), x, parts, num_heads=HEADS)
    return path


def test_a_recording_of_a_layer_is_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = Attention(WIDTH, HEADS)
    diagnosis = compare(recorded(layer, tmp_path / "a.npz"), layer)
    assert diagnosis.verdict in (Verdict.SAME, Verdict.TO_ROUNDING)
    assert diagnosis.function is not None
    assert diagnosis.function.stages == ("q", "k", "v", "output")


def test_a_fault_of_a_recorded_layer_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = Attention(WIDTH, HEADS, scale=0.9)
    path = recorded(layer, tmp_path / "a.npz")
    layer.scale = 0.4
    diagnosis = compare(path, layer)
    assert diagnosis.function is not None
    [cause] = diagnosis.function.causes
    assert (cause.name, cause.stages) == ("scale", ("output",))
    assert cause.parameters["scale"] == pytest.approx(0.9, rel=1e-4)


def test_files_that_hold_no_recording_are_refused(tmp_path: Path) -> None:
    layer = Attention(WIDTH, HEADS)
    x = np.zeros((2, 7, WIDTH), dtype=np.float32)
    path = tmp_path / "a.npz"
    np.savez(path, x=x)
    with pytest.raises(OptionError, match="without output"):
        compare(path, layer)
    np.savez(path, x=x, output=x, queries=x)
    with pytest.raises(OptionError, match="with queries"):
        compare(path, layer)
    np.savez(path, x=x, output=x, q=x)
    with pytest.raises(ShapeError, match="4 axes, with heads as the second"):
        compare(path, layer)
    np.savez(path, x=x, output=x)
    np.savez(path, x=x, output=x[:, :3])
    with pytest.raises(ShapeError, match="store both of the same call"):
        compare(path, layer)
    np.savez(path, x=x, output=x * np.nan)
    with pytest.raises(OptionError, match="outputs are all NaN"):
        compare(path, layer)
    np.savez(path, x=x[..., :30], output=x)
    with pytest.raises(ShapeError, match=r"x of shape \(2, 7, 30\) in a\.npz"):
        compare(path, layer)
    np.savez(path, x=x, output=x)
    with pytest.raises(OptionError, match="of which nothing but the outputs is known"):
        compare(path, path)
    with pytest.raises(OptionError, match=r"inputs beside a\.npz"):
        compare(path, layer, torch.zeros(1, 3, WIDTH))
    with pytest.raises(OptionError, match="modules for queries"):
        record_activations(path, lambda: x, layer.q_proj.weight, {"queries": layer}, num_heads=5)
