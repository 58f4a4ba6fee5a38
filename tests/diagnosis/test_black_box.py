"""Functions as subjects of a comparison: NumPy, no mask, failures and state."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headwise import Attention, compare
from headwise.diagnosis.simulation.model import Inputs
from headwise.errors import MaskError, OptionError, ShapeError
from headwise.identify.results import Verdict
from tests.diagnosis.test_stopped import interrupt_at

WIDTH, HEADS = 40, 5


@pytest.fixture
def layer() -> Attention:
    torch.manual_seed(0)
    return Attention(WIDTH, HEADS)


def in_numpy(layer: Attention, scale: float) -> Callable[..., Any]:
    """The layer by NumPy alone: its methods fail on tensors."""
    weights = {name: x.detach().numpy() for name, x in layer.state_dict().items()}

    def attention(x: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        def projected(name: str) -> np.ndarray:
            rows = x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
            return rows.reshape(*x.shape[:2], HEADS, -1).transpose(0, 2, 1, 3)

        q, k, v = (projected(name) for name in ("q_proj", "k_proj", "v_proj"))
        scores = q @ k.swapaxes(-1, -2) * np.float32(scale)
        scores = scores if mask is None else np.where(mask, scores, -np.inf)
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        heads = powers / powers.sum(-1, keepdims=True) @ v
        joined = heads.transpose(0, 2, 1, 3).reshape(x.shape)
        output: np.ndarray = joined @ weights["out_proj.weight"].T + weights["out_proj.bias"]
        return output

    return attention


@pytest.mark.slow
def test_a_function_of_numpy_arrays(layer: Attention) -> None:
    right, wrong = in_numpy(layer, 8**-0.5), in_numpy(layer, 1.0)
    assert compare(right, layer).verdict is Verdict.TO_ROUNDING
    assert compare(lambda x: right(x), layer).verdict is Verdict.TO_ROUNDING
    diagnosis = compare(wrong, layer)
    assert diagnosis.function is not None
    [cause] = diagnosis.function.causes
    assert cause.name == "scale"
    assert cause.parameters["scale"] == pytest.approx(1.0, rel=1e-4)


def test_inputs_may_be_a_numpy_array(layer: Attention) -> None:
    x = np.random.default_rng(0).standard_normal((2, 6, WIDTH)).astype(np.float32)
    diagnosis = compare(in_numpy(layer, 8**-0.5), layer, x)
    assert diagnosis.verdict is Verdict.TO_ROUNDING
    assert diagnosis.function is not None
    assert diagnosis.function.probes == ("your input of 6 tokens",)


def test_a_function_without_a_mask_is_run_without_one(layer: Attention) -> None:
    diagnosis = compare(lambda x: layer(x), layer)
    assert diagnosis.verdict is Verdict.SAME
    assert "40 random tokens; one random token" in str(diagnosis)
    with pytest.raises(OptionError, match="inputs with a mask for function"):
        compare(lambda x: layer(x), layer, Inputs(torch.randn(1, 3, WIDTH), mask=torch.eye(3) > 0))


def test_a_function_that_fails_is_refused_with_what_was_tried(layer: Attention) -> None:
    other = nn.Linear(WIDTH + 1, 3)
    with pytest.raises(OptionError) as error:
        compare(lambda x: other(x), layer)
    assert "on tensors (RuntimeError: mat1 and mat2" in error.value.saw
    assert "on NumPy arrays (TypeError: linear()" in error.value.saw
    assert error.value.needed == "a function that runs on x of shape (2, 11, 40), float32"
    assert isinstance(error.value.__cause__, RuntimeError)


def test_state_is_noticed(layer: Attention) -> None:
    kept: list[Tensor] = []

    def grows(x: Tensor) -> Tensor:
        kept.append(x)
        return torch.cat(kept, 1)

    with pytest.raises(OptionError, match=r"of shape \(2, 33, 40\) in place of \(2, 22, 40\)"):
        compare(grows, layer)

    lengths: list[int] = []

    def knows_the_longest(x: Tensor) -> Tensor:
        lengths.append(x.shape[1])
        output: Tensor = layer(x) * max(lengths)
        return output

    with pytest.raises(OptionError, match="on the same input, after other inputs"):
        compare(knows_the_longest, layer)


def test_a_changed_mask_is_noticed(layer: Attention) -> None:
    def fills(x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            mask.fill_(value=True)
        output: Tensor = layer(x)
        return output

    with pytest.raises(OptionError, match="changes its mask"):
        compare(fills, layer)


def test_infinite_outputs_are_refused(layer: Attention) -> None:
    with pytest.raises(OptionError, match="880 outputs of function, which are all NaN or infinite"):
        compare(lambda x: x.square() + torch.inf, layer)


def test_the_place_of_nan_is_told(layer: Attention) -> None:
    @torch.no_grad()
    def port(x: Tensor) -> Tensor:
        output: Tensor = layer(x).clone()
        output[1, 5:7] = torch.nan
        return output

    progress = interrupt_at("trying")
    function = compare(port, layer, progress=progress).function
    assert function is not None
    assert not function.causes
    [words, *_] = function.isolated
    assert words == (
        "2 of 22 outputs of the first are NaN on 11 random tokens: in sequence 1, positions 5 to "
        "6, and on 2 more inputs"
    )


def test_nan_in_one_of_two_functions_is_a_difference(layer: Attention) -> None:
    @torch.no_grad()
    def port(x: Tensor) -> Tensor:
        output: Tensor = layer(x).clone()
        output[:, -1] = torch.nan
        return output

    x = torch.randn(2, 7, WIDTH)
    for pair in ((port, lambda x: layer(x)), (lambda x: layer(x), port)):
        assert compare(*pair, x).verdict is Verdict.DIFFERENT
    assert compare(port, lambda x: port(x), x).verdict.is_same


def test_inputs_of_another_width_are_refused(layer: Attention) -> None:
    with pytest.raises(ShapeError, match=r"x of shape \(2, 6, 30\) in your input"):
        compare(layer, layer, torch.randn(2, 6, 30))
    with pytest.raises(ShapeError, match=r"give one sequence as x\[None\]"):
        compare(layer, layer, torch.randn(6, WIDTH))


def test_masks_broadcast_or_are_refused(layer: Attention) -> None:
    x = torch.randn(2, 6, WIDTH)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    assert compare(layer, layer, Inputs(x, mask=causal)).verdict is Verdict.SAME
    with pytest.raises(MaskError, match=r"a mask of torch\.float32 in your input"):
        compare(layer, layer, Inputs(x, mask=causal.float()))
    with pytest.raises(ShapeError, match=r"a mask of shape \(1, 1, 5, 5\) in your input"):
        compare(layer, layer, Inputs(x, mask=causal[:5, :5]))


def test_an_error_of_the_callers_own_class_is_said(layer: Attention) -> None:
    class OwnError(Exception):
        pass

    def fails(x: Tensor) -> Tensor:
        raise OwnError("no such head")

    with pytest.raises(OptionError, match="OwnError: no such head") as error:
        compare(fails, layer)
    assert isinstance(error.value.__cause__, OwnError)
