"""Checks that people publish: eight heads against one, on their own inputs and on headwise's."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from headwise import compare
from headwise.identify.results import Diagnosis, Verdict
from tests.quick import others_slow


def eight_and_one(fill: Callable[[Tensor], Tensor]) -> tuple[nn.Module, nn.Module]:
    eight, one = (nn.MultiheadAttention(64, heads, batch_first=True) for heads in (8, 1))
    with torch.no_grad():
        for parameter in eight.parameters():
            parameter.copy_(fill(parameter))
    one.load_state_dict(eight.state_dict())
    return eight, one


def names(diagnosis: Diagnosis) -> list[str]:
    assert diagnosis.function is not None
    return [cause.name for cause in diagnosis.function.causes]


@pytest.mark.parametrize("seed", others_slow(range(3)))
@pytest.mark.parametrize("fill", others_slow([torch.rand_like, torch.ones_like]))
def test_eight_heads_are_never_called_one(fill: Callable[[Tensor], Tensor], seed: int) -> None:
    torch.manual_seed(seed)
    eight, one = eight_and_one(fill)
    x = torch.rand(2, 10, 64) if fill is torch.rand_like else torch.randn(2, 10, 64)
    on_their_input = compare(eight, one, x)
    assert on_their_input.verdict in (Verdict.INCONCLUSIVE, Verdict.DIFFERENT)
    on_ours = compare(eight, one)
    assert on_ours.verdict is Verdict.DIFFERENT
    assert names(on_ours) == ["number of heads"]
