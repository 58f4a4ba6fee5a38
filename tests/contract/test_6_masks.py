"""Clause 6: a mask carries its polarity and its axes; floats mask by -inf alone."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from headwise.errors import HeadwiseError
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from headwise.matrix.operator import AttentionMatrix
from tests.contract.layers import identity_layer, inputs
from tests.honest import hides_a_whole_sequence


def test_the_two_conventions_of_torch_are_opposite_and_each_is_named() -> None:
    q, k = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4)
    marked = torch.rand(5, 7) > 0.5
    marked[:, 0], marked[:, 1] = True, False  # no row is empty in either reading
    attends = scaled_dot_product_attention(q, k, k, attn_mask=marked)
    blocked = nn.MultiheadAttention(12, 3, batch_first=True)
    torch.testing.assert_close(AttentionMatrix(q, k, mask=Mask.from_sdpa(marked)) @ k, attends)
    x, y = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
    weights = blocked(x, y, y, attn_mask=marked)[1]
    assert not weights[:, marked].any()
    assert not AttentionMatrix(q, k, mask=Mask.from_torch(marked)).dense()[..., marked].any()


@hides_a_whole_sequence
def test_minus_infinity_masks_and_the_lowest_number_does_not() -> None:
    layer, x = identity_layer(torch.float32), inputs(torch.float32)
    low = torch.finfo(torch.float32).min
    row = torch.full((x.shape[1], x.shape[1]), low)
    _, weights = layer(x, x, x, attn_mask=row)
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / x.shape[1]))
    _, none = layer(x, x, x, attn_mask=torch.full_like(row, -torch.inf))
    assert not none.any()
    q = torch.zeros(1, 1, 2, 4)
    bias = ScoreBias.dense(torch.tensor([low, -torch.inf]), axes="keys")
    assert AttentionMatrix(q, q, score_bias=bias).dense().flatten().tolist() == [1.0, 0.0] * 2


@pytest.mark.parametrize("queries", [3, 9])
def test_an_alignment_must_be_named_where_it_matters(queries: int) -> None:
    q, k = torch.randn(1, 2, queries, 4), torch.randn(1, 2, 6, 4)
    with pytest.raises(HeadwiseError, match=f"{queries} queries and 6 keys"):
        AttentionMatrix(q, k, mask=Mask.causal())
    first = AttentionMatrix(q, k, mask=Mask.causal(align="top-left")).dense()
    last = AttentionMatrix(q, k, mask=Mask.causal(align="bottom-right")).dense()
    torch.testing.assert_close(first[..., 0, 0], torch.ones(1, 2))
    assert bool((last[..., -1, :] > 0).all())


def test_a_cache_is_bottom_right() -> None:
    q, k = torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 4)
    whole = AttentionMatrix(q, k, mask=Mask.causal()) @ k
    step = AttentionMatrix(q[:, :, 6:], k, mask=Mask.causal(align="bottom-right")) @ k
    torch.testing.assert_close(step, whole[:, :, 6:])
