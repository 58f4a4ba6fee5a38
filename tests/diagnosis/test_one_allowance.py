"""Budget, compare and verify have one answer for a pair: within its allowance, or apart."""

import copy

import pytest
import torch
from torch import Tensor, nn

from headwise import compare, verify
from headwise.identify.results import Verdict
from headwise.testing import Budget
from tests.diagnosis.test_stopped import interrupt_at
from tests.quick import others_extra


def run(layer: nn.MultiheadAttention, x: Tensor) -> Tensor:
    x = x.to(layer.in_proj_weight.dtype)
    output: Tensor = layer(x, x, x, need_weights=False)[0]
    return output


@torch.no_grad()
def pair(dtype: torch.dtype, share: float) -> tuple[nn.MultiheadAttention, ...]:
    """Return a layer whose output is moved by a share of the allowance, and the right one."""
    torch.manual_seed(0)
    right = nn.MultiheadAttention(48, 6, bias=False, batch_first=True, dtype=dtype).eval()
    budget = budget_of(right)
    other = copy.deepcopy(right).double()
    other.out_proj.weight.mul_(1 + share * float(budget.allowed.max() / budget.exact.abs().max()))
    return other.to(dtype), right


def budget_of(layer: nn.MultiheadAttention) -> Budget:
    wide = copy.deepcopy(layer).double()
    x = tokens().to(layer.in_proj_weight.dtype)
    return Budget.for_function(lambda t: run(wide if t.dtype == torch.float64 else layer, t), x)


def tokens() -> Tensor:
    return torch.randn(3, 24, 48, generator=torch.Generator().manual_seed(1))


NAMES = {"first_layout": "torch-packed", "second_layout": "torch-packed"}


@torch.no_grad()
@pytest.mark.parametrize(
    "dtype",
    others_extra([torch.float32, torch.bfloat16, torch.float16], quick=[torch.float32]),
    ids=str,
)
@pytest.mark.parametrize("share", others_extra([0.3, 10.0], quick=[0.3]))
def test_ten_times_the_allowance_is_apart_and_a_third_is_not(
    dtype: torch.dtype, share: float
) -> None:
    other, right = pair(dtype, share)
    states = other.state_dict(), right.state_dict()
    [outputs] = verify(*states, heads=6, outputs=True, **NAMES).outputs
    answers = {
        "Budget": budget_of(right).check(run(other, tokens())).within,
        "compare": compare(other, right).verdict.is_same,
        "verify": outputs.is_same,
    }
    assert set(answers.values()) == {share < 1}, answers


@torch.no_grad()
@pytest.mark.parametrize("share", others_extra([0.7, 0.3, 10.0], 0.3, quick=[0.7]))
def test_a_function_beside_a_layer_has_the_same_allowance(share: float) -> None:
    other, right = pair(torch.float32, share)
    verdict = compare(lambda t: run(other, t), right, progress=interrupt_at("trying")).verdict
    assert verdict.is_same == compare(other, right).verdict.is_same == (share < 1)
    assert verdict is not Verdict.INCONCLUSIVE
