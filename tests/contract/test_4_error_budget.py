"""Clause 4: the error against float64, on long rows and through the layer's own projections."""

import pytest
import torch
from torch import Tensor

from headwise import MultiheadAttention
from headwise.function import stages
from headwise.function.budget import Budget
from headwise.masks.mask import Mask
from headwise.matrix.operator import AttentionMatrix
from tests.quick import others_extra
from tests.strategies import DTYPES

QUERIES, KEYS = 301, 1153
MASKS = {
    "plain": Mask(),
    "bottom-right": Mask.causal(align="bottom-right"),
    "window": Mask.window(90, 7, align="top-left"),
    "lengths": Mask.lengths(keys=torch.tensor([KEYS, 640])),
}


def long_tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(2, 4, QUERIES, 16, dtype=torch.float64) * 2
    k, v = (torch.randn(2, 2, KEYS, width, dtype=torch.float64) for width in (16, 5))
    return q.to(dtype), k.to(dtype), v.to(dtype)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    others_extra(
        [
            *(("plain", dtype) for dtype in DTYPES),
            *((kind, torch.float32) for kind in MASKS if kind != "plain"),
        ],
        ("plain", DTYPES[0]),
        ("lengths", torch.float32),
    ),
)
def test_long_rows_are_within_the_budget(kind: str, dtype: torch.dtype) -> None:
    q, k, v = long_tensors(dtype)
    mask = MASKS[kind]
    for softcap in (None, 20.0):  # both kernels
        matrix = AttentionMatrix(q, k, mask=mask, softcap=softcap)
        options = {"mask": mask, "softcap": softcap}
        # factor 0: the half dtypes compute in float32 and round what they store.
        factor = 2.0 if dtype in (torch.float64, torch.float32) else 0.0
        outputs = Budget.for_head_outputs(q, k, v, factor=factor, **options)
        outputs.assert_holds(matrix @ v)
        found = matrix.statistics()
        Budget.for_entropy(q, k, factor=factor, **options).assert_holds(found.entropy)
        Budget.for_logsumexp(q, k, factor=factor, **options).assert_holds(found.logsumexp)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_small_mistake_is_outside(dtype: torch.dtype) -> None:
    q, k, v = long_tensors(dtype)
    budget = Budget.for_head_outputs(q, k, v, factor=0.0)
    wrong = AttentionMatrix(q, k, scale=1.01 * stages.default_scale(q)) @ v
    assert not budget.check(wrong)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_the_whole_layer_is_within_the_budget(training: bool, need_weights: bool) -> None:
    layer = MultiheadAttention(60, 6, batch_first=True).train(training)
    x = torch.randn(3, 24, 60)

    def plain(x: Tensor, w: Tensor, b: Tensor, w_out: Tensor, b_out: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (6, 10)).transpose(1, 2) for part in (x @ w.mT + b).chunk(3, -1)
        )
        return stages.head_outputs(q, k, v).transpose(1, 2).flatten(2) @ w_out.mT + b_out

    parameters = [p.detach() for p in layer.parameters()]
    budget = Budget.for_function(plain, x, *parameters)
    with torch.set_grad_enabled(training):
        budget.assert_holds(layer(x, x, x, need_weights=need_weights)[0])
    assert not budget.check(layer(x, x.flip(1), x)[0])
