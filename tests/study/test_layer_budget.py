"""The formula of a whole layer and its error budget: safe for honest layers, tight for others."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headwise.function import stages
from headwise.layers.attention import Attention
from headwise.masks.mask import Mask
from headwise.study.implementations import SharedWeights
from headwise.study.measures import layer_error_budget, layer_output


def drawn(
    dtype: torch.dtype = torch.float32, seed: int = 1
) -> tuple[Tensor, Tensor, Tensor, SharedWeights]:
    """6 heads of head_dim 10 and value_dim 7, for inputs of three widths."""
    torch.manual_seed(seed)
    sizes = ((60, 40), (60, 29), (42, 23), (31, 42))
    matrices = [torch.randn(size, dtype=dtype) / size[1] ** 0.5 for size in sizes]
    biases = [torch.randn(size[0], dtype=dtype) for size in sizes]
    x, keys, values = (torch.randn(3, n, w, dtype=dtype) for n, w in ((5, 40), (9, 29), (9, 23)))
    return x, keys, values, SharedWeights.of_matrices(matrices, biases)


@pytest.mark.parametrize("biased", [True, False])
def test_the_formula_is_the_reference_arithmetic(biased: bool) -> None:
    *inputs, w = drawn(torch.float64)
    w = w if biased else replace(w, biases=None)
    *inner, out_bias = w.biases or [torch.zeros(1)] * 4
    q, k, v = (
        stages.split_heads(x @ matrix.mT + bias, heads=6)
        for x, matrix, bias in zip(inputs, w.matrices[:3], inner, strict=True)
    )
    mask = Mask.lengths(keys=torch.tensor([9, 4, 1]))
    outputs = stages.head_outputs(q, k, v, mask=mask)
    expected = stages.merge_heads(outputs) @ w.out.mT + out_bias
    found = layer_output(*inputs, *w.tensors, num_heads=6, mask=mask)
    torch.testing.assert_close(found, expected)


def test_one_head_that_sees_one_key_gives_its_value() -> None:
    one, none = torch.ones(1, 1), torch.zeros(1)
    weights = SharedWeights(one, one, 3 * one, 2 * one, (none, none, none, one[0]))
    inputs = (one[None], one[None], 5 * one[None])
    assert layer_output(*inputs, *weights.tensors, num_heads=1).item() == 5 * 3 * 2 + 1


@pytest.mark.slow
def test_honest_layers_stay_far_under_it() -> None:
    """A third of it is never used; a budget that is a thousand times too large would be none."""
    shares = []
    for seed in range(40):
        x, keys, values, w = drawn(seed=seed)
        allowed = layer_error_budget(x, keys, values, w, num_heads=6)
        plain = layer_output(x, keys, values, *w.tensors, num_heads=6)
        shares.append(allowed.check(plain).ratio)
        layer = Attention(48, 4).eval()
        linears = (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)
        x = torch.randn(2, 33, 48)
        allowed = layer_error_budget(x, x, x, SharedWeights.of_linears(*linears), num_heads=4)
        shares.append(allowed.check(layer(x)).ratio)
    assert max(shares) < 2 / 3
    assert min(shares) > 0.005


def test_it_sees_one_head_that_is_off_by_a_ten_thousandth() -> None:
    x, keys, values, w = drawn()
    allowed = layer_error_budget(x, keys, values, w, num_heads=6)
    assert allowed.check(layer_output(x, keys, values, *w.tensors, num_heads=6)).within
    turned = replace(w, v=torch.cat([w.v[:35], w.v[35:] * (1 + 1e-4)]))
    wrong = layer_output(x, keys, values, *turned.tensors, num_heads=6)
    assert not allowed.check(wrong).within
