"""Clause 2: a query that may attend to nothing has zero weights, zero outputs, finite gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from headwise.matrix.operator import AttentionMatrix
from tests.contract.layers import BATCH, LENGTH, identity_layer, inputs
from tests.honest import hides_a_whole_sequence

EMPTY = {
    "lengths": {"mask": Mask.lengths(keys=torch.tensor([0, 4, 29]))},
    "query lengths": {"mask": Mask.lengths(queries=torch.tensor([0, 3, 24]))},
    "bands that exclude each other": {
        "mask": Mask.window(0, 0, align="bottom-right") & Mask.window(0, 0, align="top-left")
    },
    "nothing": {"mask": Mask.may_attend(torch.zeros(1, dtype=torch.bool), axes="keys")},
    "one head": {"mask": Mask.may_attend(torch.arange(6) != 2, axes="heads")},
    "bias": {"score_bias": ScoreBias.dense(torch.full((29,), -torch.inf), axes="keys")},
}


@pytest.mark.parametrize("softcap", [None, 3.0])  # 3.0 sends the product to the tiled kernel
@pytest.mark.parametrize("kind", EMPTY)
def test_zero_weights_zero_outputs_finite_gradients(kind: str, softcap: float | None) -> None:
    q = torch.randn(3, 6, 24, 10, requires_grad=True)
    k = torch.randn(3, 2, 29, 10, requires_grad=True)
    v = torch.randn(3, 2, 29, 10, requires_grad=True)
    options: dict[str, Any] = dict(EMPTY[kind], softcap=softcap)
    matrix = AttentionMatrix(q, k, **options)
    dense = matrix.dense()
    empty = (dense == 0).all(-1)
    assert bool(empty.any())  # or the test says nothing
    found, out = matrix.statistics(), matrix @ v
    assert not out[empty].any()
    assert bool((found.logsumexp[empty] == -torch.inf).all())
    assert not found.entropy[empty].any()
    assert not found.maximum[empty].any()
    finite = found.logsumexp.masked_fill(empty, 0.0)
    read = (out, finite, found.entropy, found.maximum, found.received, matrix.head_average(), dense)
    gradients = torch.autograd.grad([x.sum() for x in read], (q, k, v), allow_unused=True)
    for gradient in gradients:
        assert gradient is not None
        assert bool(gradient.isfinite().all())
    assert not gradients[0][empty].any()


@hides_a_whole_sequence
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_a_sample_of_padding_alone_leaves_the_others_untouched(
    need_weights: bool, grad: bool, training: bool
) -> None:
    layer = identity_layer().train(training)
    with torch.no_grad():
        layer.out_proj.bias.fill_(0.25)
    x = inputs().requires_grad_(grad)
    padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padding[1] = True
    with torch.set_grad_enabled(grad):
        out, weights = layer(x, x, x, key_padding_mask=padding, need_weights=need_weights)
        plain = layer(x, x, x, need_weights=need_weights)[0]
    assert bool((out[1] == 0.25).all())
    torch.testing.assert_close(out[::2], plain[::2])
    if weights is not None:
        assert not weights[1].any()
    if grad:
        out.sum().backward()
        _all_finite([x, *layer.parameters()])


def _all_finite(leaves: list[Tensor]) -> None:
    for leaf in leaves:
        assert leaf.grad is not None
        assert bool(leaf.grad.isfinite().all())
