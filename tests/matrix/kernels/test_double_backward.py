"""The gradient of the tiled kernel's gradient, which is taken through the weights written down."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from headwise import AttentionMatrix, Mask, ScoreBias


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def read(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor, table: Tensor, bias: Tensor
) -> tuple[Tensor, ...]:
    matrix = AttentionMatrix(
        q,
        k,
        mask=Mask.window(3, 1, align="bottom-right"),
        score_bias=ScoreBias.relative(table, align="top-left")
        + ScoreBias.dense(bias, axes="heads queries keys"),
        softcap=3.0,
        sink=sink,
    )
    statistics = matrix.statistics()
    return matrix @ v, matrix.mT @ q, matrix.head_average(), *statistics


@pytest.fixture
def leaves() -> tuple[Tensor, ...]:
    return leaf(2, 4, 5, 3), leaf(2, 2, 7, 3), leaf(2, 2, 7, 2), leaf(4), leaf(4, 3), leaf(4, 5, 7)


@pytest.mark.slow
def test_every_input_has_a_second_derivative(leaves: tuple[Tensor, ...]) -> None:
    assert gradcheck(read, leaves, fast_mode=True)
    assert gradgradcheck(read, leaves, fast_mode=True)


def test_the_first_derivative_is_the_tiled_one(leaves: tuple[Tensor, ...]) -> None:
    outputs = read(*leaves)
    upstream = [torch.randn_like(x) for x in outputs]
    tiled = torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)
    written = torch.autograd.grad(outputs, leaves, upstream, create_graph=True)
    assert all(x.requires_grad for x in written)
    for a, b in zip(written, tiled, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=1e-12, atol=1e-13)


def test_one_tensor_as_queries_keys_and_values() -> None:
    x = leaf(2, 2, 5, 3)

    def call(x: Tensor) -> Tensor:
        return AttentionMatrix(x, x, mask=Mask.window(2, 1), softcap=3.0) @ x

    assert gradgradcheck(call, (x,))


def test_without_a_graph_of_the_gradient_nothing_is_kept() -> None:
    x = leaf(2, 2, 5, 3)
    output = AttentionMatrix(x, x, softcap=3.0) @ x
    (gradient,) = torch.autograd.grad(output.square().sum(), x)
    assert not gradient.requires_grad
