"""Clause 5: nothing of queries x keys unless it was asked for, and no input is changed."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headwise import MultiheadAttention
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from headwise.matrix.operator import AttentionMatrix
from tests.memory import LargestTensor

LENGTH = 1500
CALLS: dict[str, Callable[[AttentionMatrix, Tensor], object]] = {
    "product": lambda a, v: a @ v,
    "narrow product": lambda a, v: a @ v[..., :3],
    "transposed": lambda a, v: a.mT @ v,
    "statistics": lambda a, v: a.statistics(),
    "diagonal": lambda a, v: a.diagonal(-1),
    "rows": lambda a, v: a.rows(torch.tensor([1, 5, 1400])),
    "pool": lambda a, v: a.pool(16, 16),
}
OPTIONS: dict[str, Callable[[], dict[str, object]]] = {
    "plain": dict,
    "causal": lambda: {"mask": Mask.causal()},
    "window": lambda: {"mask": Mask.window(7, 2)},
    "lengths and causal": lambda: {"mask": Mask.causal() & Mask.lengths(keys=torch.tensor([900]))},
    "segments": lambda: {"mask": Mask.segments(torch.arange(LENGTH)[None] // 100)},
    "alibi": lambda: {"score_bias": ScoreBias.alibi(torch.tensor([0.1, 0.2]))},
    "softcap": lambda: {"softcap": 4.0},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("call", CALLS)
def test_no_reading_writes_queries_by_keys(call: str, option: str) -> None:
    q, k, v = (torch.randn(1, 2, LENGTH, 8) for _ in range(3))
    with LargestTensor() as seen:
        CALLS[call](AttentionMatrix(q, k, **OPTIONS[option]()), v)  # type: ignore[arg-type]
    assert seen.bytes < LENGTH * LENGTH, seen.name  # not even one bool for each entry


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_the_layer_writes_no_queries_by_keys(training: bool, padded: bool) -> None:
    layer = MultiheadAttention(16, 2, batch_first=True).train(training)
    x = torch.randn(2, LENGTH, 16, requires_grad=training)
    padding = torch.zeros(2, LENGTH, dtype=torch.bool)
    padding[1, 900:] = True
    with LargestTensor() as seen:
        out, _ = layer(x, x, x, need_weights=False, key_padding_mask=padding if padded else None)
        if training:
            out.sum().backward()
    assert seen.bytes < LENGTH * LENGTH, seen.name


@pytest.mark.parametrize("grad", [False, True])
def test_average_weights_come_without_those_of_single_heads(grad: bool) -> None:
    layer, x = MultiheadAttention(32, 8, batch_first=True), torch.randn(2, LENGTH, 32)
    with torch.set_grad_enabled(grad), LargestTensor() as seen:
        out, weights = layer(x, x, x)
        if grad:
            out.sum().backward()
    assert seen.bytes == weights.untyped_storage().nbytes() == 2 * LENGTH * LENGTH * 4


def test_no_input_is_changed() -> None:
    q, k, v = (torch.randn(2, 2, 40, 8) for _ in range(3))
    later = torch.ones(40, 40, dtype=torch.bool).triu(1)
    bias, sink = torch.randn(2, 40, 40), torch.randn(2)
    given = (q, k, v, later, bias, sink)
    before = [x.clone() for x in given]
    versions = [x._version for x in given]
    matrix = AttentionMatrix(
        q,
        k,
        mask=Mask.from_torch(later),
        score_bias=ScoreBias.dense(bias, axes="heads queries keys"),
        softcap=2.0,
        sink=sink,
    )
    for call in CALLS.values():
        if call is not CALLS["rows"]:
            call(matrix, v)
    layer, x = MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 40, 16)
    layer(x, x, x, attn_mask=later, key_padding_mask=later[:2])
    layer(x, x, x, attn_mask=bias[0].masked_fill(later, -torch.inf), is_causal=True)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
    assert [x._version for x in given] == versions
