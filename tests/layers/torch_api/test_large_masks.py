"""Float masks with numbers that the dtype of the scores cannot hold: they keep their sign."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise import Attention, AttentionMatrix, ScoreBias
from headwise.huggingface.attention import attend
from headwise.layers import multi_head_attention_forward
from headwise.masks.score_bias import cast_bias
from tests.honest import normal
from tests.layers.torch_api.cases import BATCH, EMBED, HEADS, KEYS, QUERIES, pair

LARGEST = torch.finfo(torch.float32).max
# What the layer computes in, what the mask is written in, and the number.
TOO_LARGE = [
    (torch.float16, torch.float32, 7e4),
    (torch.bfloat16, torch.float32, LARGEST),
    (torch.float32, torch.float64, 1e39),
]
too_large = pytest.mark.parametrize(("dtype", "of_mask", "number"), TOO_LARGE)


def with_first_key(shape: tuple[int, ...], dtype: torch.dtype, number: float) -> Tensor:
    mask = torch.zeros(shape, dtype=dtype)
    mask[..., 0] = number
    return mask


def assert_first_key_alone(weights: Tensor) -> None:
    assert weights[..., 0].eq(1).all()
    assert weights[..., 1:].eq(0).all()


@too_large
@pytest.mark.parametrize(
    ("where", "shape"),
    [
        ("attn_mask", (QUERIES, KEYS)),
        ("attn_mask", (BATCH * HEADS, QUERIES, KEYS)),
        ("key_padding_mask", (BATCH, KEYS)),
    ],
)
def test_a_large_positive_mask_is_attended_to(
    where: str, shape: tuple[int, ...], dtype: torch.dtype, of_mask: torch.dtype, number: float
) -> None:
    _, ours = pair(dtype=dtype, batch_first=True)
    q, k = normal(BATCH, QUERIES, EMBED, dtype=dtype), normal(BATCH, KEYS, EMBED, dtype=dtype)
    mask = {where: with_first_key(shape, of_mask, number)}
    output, weights = ours(q, k, k, average_attn_weights=False, **mask)
    assert_first_key_alone(weights)
    assert output.isfinite().all()
    fused, _ = ours(q, k, k, need_weights=False, **mask)
    torch.testing.assert_close(fused, output)


@too_large
def test_the_functional_form(dtype: torch.dtype, of_mask: torch.dtype, number: float) -> None:
    _, ours = pair(dtype=dtype)
    q, k = normal(QUERIES, BATCH, EMBED, dtype=dtype), normal(KEYS, BATCH, EMBED, dtype=dtype)
    parameters = (ours.in_proj_weight, ours.in_proj_bias, None, None, False, 0.0)
    out_proj = (ours.out_proj.weight, ours.out_proj.bias)
    masks: tuple[dict[str, Any], ...] = (
        {"attn_mask": with_first_key((QUERIES, KEYS), of_mask, number)},
        {"key_padding_mask": with_first_key((BATCH, KEYS), of_mask, number)},
    )
    for mask in masks:
        _, weights = multi_head_attention_forward(
            q, k, k, EMBED, HEADS, *parameters, *out_proj, **mask
        )
        assert weights is not None
        assert_first_key_alone(weights)


@pytest.mark.parametrize(("dtype", "of_mask", "number"), TOO_LARGE[:2])
def test_a_matrix_and_the_native_layer(
    dtype: torch.dtype, of_mask: torch.dtype, number: float
) -> None:
    bias = ScoreBias.dense(with_first_key((KEYS,), of_mask, number), axes="keys")
    q, k = normal(BATCH, HEADS, QUERIES, 10, dtype=dtype), normal(BATCH, 2, KEYS, 10, dtype=dtype)
    a = AttentionMatrix(q, k, score_bias=bias)
    assert_first_key_alone(a.dense())
    first = k[:, :, :1].repeat_interleave(HEADS // 2, 1).expand_as(q)
    assert torch.equal(a @ k, first)
    layer, x = Attention(42, HEADS, dtype=dtype), normal(BATCH, KEYS, 42, dtype=dtype)
    assert_first_key_alone(layer.matrix(x, score_bias=bias).dense())


@too_large
def test_a_model_of_transformers(dtype: torch.dtype, of_mask: torch.dtype, number: float) -> None:
    q, k = normal(BATCH, HEADS, QUERIES, 10, dtype=dtype), normal(BATCH, 2, KEYS, 10, dtype=dtype)
    mask = with_first_key((1, 1, 1, KEYS), of_mask, number)
    mask[..., 1] = torch.finfo(of_mask).min
    for options in ({}, {"position_bias": torch.zeros_like(mask)}):
        _, weights = attend(nn.Module(), q, k, k, mask, output_attentions=True, **options)
        assert weights is not None
        assert_first_key_alone(weights)


def test_where_values_cannot_be_read_a_bias_keeps_its_sign_too() -> None:
    numbers = torch.tensor([1e39, -1e39, torch.inf, -torch.inf, 2.5], dtype=torch.float64)
    largest = torch.finfo(torch.float32).max
    expected = [largest, -largest, torch.inf, -torch.inf, 2.5]
    assert cast_bias(numbers, torch.float32).tolist() == expected
    assert torch.equal(cast_bias(numbers, torch.float64), numbers)


def test_finite_numbers_of_float64_do_not_hide() -> None:
    low = ScoreBias.dense(torch.full((5,), -1e39, dtype=torch.float64), axes="keys")
    a = AttentionMatrix(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 5, 4), score_bias=low)
    assert torch.equal(a.dense(), torch.full((1, 1, 3, 5), 0.2))
    assert a.seen_by(torch.ones(1, 3, dtype=torch.bool)).flatten().tolist() == [3] * 5
    (tile,) = a.tiles()
    assert tile.allowed.flatten().tolist() == [5] * 3


def test_a_sum_that_float16_cannot_hold_is_the_same_on_every_path() -> None:
    most = torch.finfo(torch.float16).max
    biases = [torch.tensor([most, most, 0.0]), torch.tensor([0.0, most, 0.0])]
    bias = ScoreBias(tensors=tuple(b.half()[None, None, None] for b in biases))
    q, k = torch.zeros(1, 1, 2, 4).half(), torch.zeros(1, 1, 3, 4).half()
    a, v = AttentionMatrix(q, k, score_bias=bias), normal(1, 1, 3, 4, dtype=torch.float16)
    assert a.dense()[0, 0].tolist() == [[0, 1, 0]] * 2
    assert torch.equal(a @ v, v[:, :, 1:2].expand(-1, -1, 2, -1))
    assert torch.equal(a.dropped(v, dropout_p=0.0), v[:, :, 1:2].expand(-1, -1, 2, -1))


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("grad", [False, True])
def test_two_large_masks_are_still_finite(sign: float, grad: bool) -> None:
    number = sign * LARGEST
    _, ours = pair(dtype=torch.float32, batch_first=True)
    query, key = torch.randn(BATCH, QUERIES, EMBED), torch.randn(BATCH, KEYS, EMBED)
    added, padding = torch.full((QUERIES, KEYS), number), torch.full((BATCH, KEYS), number)
    with torch.set_grad_enabled(grad):
        for need_weights in (False, True):
            kwargs = {"key_padding_mask": padding, "attn_mask": added}
            output, weights = ours(query, key, key, need_weights=need_weights, **kwargs)
            assert output.isfinite().all()
            if weights is not None:  # finfo.min hides nothing
                torch.testing.assert_close(weights, torch.full_like(weights, 1 / KEYS))


def test_biases_that_overflow_together_on_every_path() -> None:
    q, k, v = normal(1, 2, 4, 8), normal(1, 2, 8, 8, seed=1), normal(1, 2, 8, 8, seed=2)
    first = ScoreBias.dense(with_first_key((4, 8), torch.float32, LARGEST), axes="queries keys")
    table = ScoreBias.relative(torch.full((2, 3), LARGEST), align="top-left")
    for bias in (first + first, first + first + first):
        matrix = AttentionMatrix(q, k, score_bias=bias)
        assert_first_key_alone(matrix.dense())
        assert torch.equal(matrix @ v, v[:, :, :1].expand(-1, -1, 4, -1))
        assert_first_key_alone(next(matrix.tiles()).weights)
        assert matrix.diagonal()[..., 0].eq(1).all()
    assert AttentionMatrix(q, k, score_bias=table + table).dense().isfinite().all()


@pytest.mark.parametrize("slope", [1e38, -1e38])
def test_a_steep_slope_hides_nothing_and_is_finite(slope: float) -> None:
    q, k = normal(1, 2, 4, 8), normal(1, 2, 8, 8, seed=1)
    bias = ScoreBias.alibi(torch.full((2,), slope), align="top-left")
    matrix = AttentionMatrix(q, k, score_bias=bias)
    assert matrix.dense().isfinite().all()
    assert matrix.seen_by(torch.ones(1, 4, dtype=torch.bool)).eq(4).all()
