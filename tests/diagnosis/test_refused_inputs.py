"""Inputs, weights and recordings with which nothing can be compared: each is named."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwise import Attention, compare
from headwise.errors import HeadwiseError, OptionError, ShapeError

WIDTH, HEADS = 40, 5
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def layer() -> Attention:
    torch.manual_seed(0)
    return Attention(WIDTH, HEADS)


@pytest.mark.parametrize(
    ("inputs", "error", "saw"),
    [
        (torch.zeros(1, 0, WIDTH), ShapeError, r"x of shape \(1, 0, 40\) in your input, without a"),
        (torch.zeros(0, 3, WIDTH), ShapeError, r"x of shape \(0, 3, 40\) in your input, without a"),
        (torch.full((1, 2, WIDTH), NAN), OptionError, "x in your input with 80 of 80 entries NaN"),
        (torch.full((1, 2, WIDTH), INF), OptionError, "x in your input with 80 of 80 entries NaN"),
        ([[1.0]], OptionError, "inputs of type list"),
        (np.array([["word"]]), OptionError, "an array of <U4 as the inputs"),
    ],
)
def test_inputs(layer: Attention, inputs: Any, error: type[HeadwiseError], saw: str) -> None:
    with pytest.raises(error, match=saw):
        compare(copy.deepcopy(layer), layer, inputs)


@pytest.mark.parametrize("number", [NAN, -INF])
def test_weights_that_are_not_finite(layer: Attention, number: float) -> None:
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.k_proj.weight[3, 2] = number
    saw = "with 1 of 1600 entries of its keys that are NaN or infinite"
    with pytest.raises(OptionError, match=f"a {saw}"):
        compare(other, layer)
    with pytest.raises(OptionError, match=f"b {saw}"):
        compare(layer.forward, other)


def test_weights_without_numbers(layer: Attention) -> None:
    with pytest.raises(OptionError, match="b on the meta device, where queries, "):
        compare(layer, copy.deepcopy(layer).to("meta"))


@pytest.mark.parametrize(
    ("arrays", "saw"),
    [
        ({"x": np.array(["word"])}, "cannot be read: TypeError"),
        ({"x": np.array([None])}, "cannot be read: ValueError: Object arrays"),
        ({"output": np.zeros((2, 7, WIDTH), np.int64)}, r"output of torch\.int64"),
        ({"q": np.zeros((2, 3, 7, 8), np.float32)}, r"q of shape \(2, 3, 7, 8\)"),
        ({"k": np.zeros((3, 5, 7, 8), np.float32)}, r"k of shape \(3, 5, 7, 8\)"),
        ({"weights": np.zeros((2, 5, 7, 6), np.float32)}, r"weights of shape \(2, 5, 7, 6\)"),
        ({"output": np.zeros((2, 7, 16), np.float32)}, r"output of shape \(2, 7, 16\)"),
    ],
)
def test_recordings(layer: Attention, tmp_path: Path, arrays: dict[str, Any], saw: str) -> None:
    x = torch.randn(2, 7, WIDTH)
    whole = {"x": x.numpy(), "output": layer(x).detach().numpy(), **arrays}
    np.savez(tmp_path / "a.npz", **whole)
    with pytest.raises(HeadwiseError, match=saw):
        compare(tmp_path / "a.npz", layer)


@pytest.mark.parametrize("content", [b"words", b"PK\x03\x04 words"])
def test_files_without_arrays(layer: Attention, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(content)
    with pytest.raises(OptionError, match=r"a\.npz, which cannot be read: it is no zip file"):
        compare(path, layer)


def test_a_file_that_is_no_safetensors(layer: Attention, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"words" * 9)
    with pytest.raises(HeadwiseError, match="header too large"):
        compare(path, layer)
