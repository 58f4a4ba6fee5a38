"""Functions whose outputs no attention has: each is compared, or refused with a sentence."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headwise import Attention, Rotary, compare
from headwise.diagnosis.outputs import reading
from headwise.errors import OptionError
from headwise.function.scaling import YarnScaling
from headwise.identify.results import Verdict
from tests.quick import others_extra, others_slow

WIDTH, HEADS = 12, 3
torch.manual_seed(0)
LAYER = Attention(WIDTH, HEADS).requires_grad_(False)
BUFFER = torch.zeros(2**16, dtype=torch.float64)


def fill_buffer(x: Tensor) -> Tensor:
    output = LAYER(x.float())
    return BUFFER[: output.numel()].view_as(output).copy_(output)


def array(x: Tensor) -> np.ndarray[Any, Any]:
    result: np.ndarray[Any, Any] = LAYER(x).numpy()
    return result


@pytest.mark.parametrize(
    "port",
    others_slow(
        [
            fill_buffer,
            lambda x: array(x)[:, ::-1].copy()[:, ::-1],
            lambda x: array(x).astype(">f4"),
            lambda x: array(x).astype(np.longdouble),
        ]
    ),
    ids=["one buffer for all", "a reversed view", "big-endian", "long double"],
)
def test_outputs_in_another_memory_are_the_same(port: Callable[..., Any]) -> None:
    assert compare(port, LAYER).verdict.is_same


@pytest.mark.parametrize(
    ("change", "saw"),
    [
        (Tensor.long, "torch.int64"),
        (lambda x: x > 0, "torch.bool"),
        (lambda x: 1j * x, "torch.complex64"),
        (lambda x: x.to(torch.float8_e4m3fn), "torch.float8_e4m3fn"),
        (Tensor.to_sparse, r"torch.float32 \(sparse"),
        (lambda x: x.to("meta"), r"torch.float32 \(sparse, nested or on meta"),
        (lambda x: x.numpy().astype(int), "int64"),
        (lambda x: x.numpy().astype(object), "object"),
    ],
)
def test_outputs_that_are_no_real_floats_are_refused(
    change: Callable[[Tensor], Any], saw: str
) -> None:
    with pytest.raises(OptionError, match=f"an output of {saw}"):
        compare(lambda x: change(LAYER(x)), LAYER, torch.randn(2, 5, WIDTH))


def test_a_required_source_is_the_tokens_where_the_widths_are_equal() -> None:
    layer = Attention(WIDTH, HEADS, source_dim=WIDTH)

    def port(x: Tensor, source: Tensor) -> Tensor:
        output: Tensor = layer(x, source)
        return output

    assert compare(port, layer).verdict.is_same


def test_random_outputs_with_nan_are_refused() -> None:
    layer = Attention(30, HEADS)

    def port(x: Tensor) -> Tensor:
        return torch.where(torch.arange(30) > 0, F.dropout(layer(x)), torch.nan)

    with pytest.raises(OptionError, match="random outputs"):
        compare(port, layer)


def test_sizes_whose_squares_are_zero() -> None:
    assert reading._size(torch.full((3, 4), 1e-200, dtype=torch.float64)) > 0


@pytest.mark.parametrize("factor", others_extra([1e20, 1e-200]))
def test_huge_and_tiny_outputs(factor: float) -> None:
    torch.manual_seed(1)
    layer = Attention(WIDTH, 2, out_dim=1, scale=3.0)
    with torch.no_grad():
        layer.q_proj.weight.mul_(100)
    found = compare(lambda x: layer(x).double() * factor + x.double().sum(2, True), layer)
    assert found.verdict in (Verdict.UNKNOWN, Verdict.DIFFERENT)


@pytest.mark.parametrize("number", others_extra([1.0, 0.0]))
def test_a_constant_is_no_norm_and_no_sink(number: float) -> None:
    found = compare(lambda x: torch.full_like(x, number), LAYER)
    assert found.function is not None
    assert not {"norm inside", "sinks"} & {*found.function.cause_names_with_equals}


@pytest.mark.extra
def test_a_scaling_without_frequencies_at_some_theta() -> None:
    """YaRN has no ramp where theta is small, which is tried too."""
    scaling = YarnScaling(4.0, original_length=32768)
    layer = Attention(WIDTH, 2, rotary=Rotary(scaling=scaling))
    found = compare(lambda x: layer(x) + x.sin().sum(2, keepdim=True), layer)
    assert found.verdict is Verdict.UNKNOWN
