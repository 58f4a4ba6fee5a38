"""Weights in NumPy arrays: the same answers as for tensors."""

from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise.errors import DTypeError, OptionError


def weights(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return nn.MultiheadAttention(42, 6, dtype=dtype).state_dict()


def read_only(x: Tensor) -> np.ndarray:
    array = x.numpy().copy()
    array.flags.writeable = False
    return array


FORMS: dict[str, Callable[[Tensor], np.ndarray]] = {
    "plain": lambda x: x.numpy(),
    "read only, as from a file that is mapped": read_only,
    "big-endian": lambda x: x.numpy().astype(">f4"),
    "backwards in memory": lambda x: x.numpy()[::-1].copy()[::-1],
    "columns first": lambda x: np.asfortranarray(x.numpy()),
}


def assert_same(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_arrays_are_converted(form: Callable[[Tensor], np.ndarray]) -> None:
    state = weights()
    arrays = {name: form(x) for name, x in state.items()}
    got = headwise.convert(arrays, "torch-packed", "gpt2", heads=6)
    assert_same(got, headwise.convert(state, "torch-packed", "gpt2", heads=6))


def test_the_result_shares_no_memory_with_an_array() -> None:
    arrays = {name: x.numpy().copy() for name, x in weights().items()}
    got = headwise.convert(arrays, "torch-packed", "torch-packed", heads=6)
    for array in arrays.values():
        array[:] = 7
    assert_same(got, weights())


def test_bfloat16_of_jax() -> None:
    state = weights(torch.bfloat16)
    arrays = {n: x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) for n, x in state.items()}
    got = headwise.convert(arrays, "torch-packed", "gpt2", heads=6)
    assert_same(got, headwise.convert(state, "torch-packed", "gpt2", heads=6))


def test_arrays_beside_tensors() -> None:
    state = weights()
    arrays = {name: x.numpy() for name, x in state.items()}
    found = headwise.detect(arrays, heads=6)
    assert found.layout is not None
    assert found.layout.name == "torch-packed"
    assert headwise.verify(arrays, state, heads=6).verdict.is_same
    arrays["out_proj.bias"] = arrays["out_proj.bias"] + 1
    assert not headwise.verify(arrays, state, heads=6).verdict.is_same


def test_a_layer_is_made_of_arrays() -> None:
    state = weights()
    arrays = {name: x.numpy() for name, x in state.items()}
    ours, theirs = (
        headwise.Attention.from_layout(given, layout="torch-packed", num_heads=6)
        for given in (arrays, state)
    )
    assert_same(ours.state_dict(), theirs.state_dict())


def test_arrays_without_numbers() -> None:
    arrays = {name: x.numpy() for name, x in weights().items()}
    arrays["names"] = np.array(["q", "k"])
    with pytest.raises(DTypeError, match="names, a NumPy array of <U1"):
        headwise.convert(arrays, "torch-packed", "gpt2", heads=6)
    with pytest.raises(OptionError, match="a list"):
        headwise.detect({"weights": [1.0, 2.0]})  # type: ignore[dict-item]
