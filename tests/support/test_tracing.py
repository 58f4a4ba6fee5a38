"""When a value may be read."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from headwise import AttentionMatrix, Mask, ScoreBias
from headwise.errors import MaskError
from headwise.support.tracing import may_read_values
from tests.memory import LargestTensor


def test_a_plain_tensor_in_eager_mode() -> None:
    assert may_read_values(torch.ones(3))
    assert may_read_values(torch.nn.Parameter(torch.ones(3)))


def test_not_on_the_meta_device_nor_of_a_subclass() -> None:
    assert not may_read_values(torch.ones(3, device="meta"))
    assert not may_read_values(torch.ones(3).as_subclass(type("Own", (Tensor,), {})))
    with FakeTensorMode():
        assert not may_read_values(torch.ones(3))


def test_not_while_transformed_traced_or_dispatched() -> None:
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(may_read_values(x))
        return x * 2

    torch.func.vmap(look)(torch.ones(3))
    torch.func.grad(lambda x: look(x).sum())(torch.ones(3))
    with pytest.warns(DeprecationWarning, match=r"torch\.jit\.trace"):
        torch.jit.trace(look, torch.ones(3), check_trace=False)
    with LargestTensor():
        look(torch.ones(3))
    assert seen == [False] * 4


def test_values_are_checked_where_they_may_be_read() -> None:
    q, k = torch.randn(3, 2, 4, 5), torch.randn(3, 2, 7, 5)
    too_long, holey = torch.tensor([7, 8, 1]), torch.full((7,), torch.nan)
    bias = ScoreBias.dense(holey, axes="keys")
    for options in ({"mask": Mask.lengths(keys=too_long)}, {"score_bias": bias}):
        with pytest.raises(MaskError):
            AttentionMatrix(q, k, **options)
        with LargestTensor():
            AttentionMatrix(q, k, **options)
