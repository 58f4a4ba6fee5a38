"""Integers of every dtype mean what they mean in int64: none wraps, and none is refused."""

import jaxtyping
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headwise import Attention, AttentionMatrix, Mask, Rotary, ScoreBias
from headwise.errors import OptionError
from headwise.huggingface.attention import attend
from headwise.masks.clauses.band import Band
from headwise.models import planted
from headwise.scanning.call import RepeatedTokens

DTYPES = (
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32),
)
BATCH, HEADS, QUERIES, KEYS, HEAD_DIM = 3, 6, 24, 29, 10
KEY_LENGTHS, QUERY_LENGTHS = torch.tensor([29, 0, 11]), torch.tensor([24, 3, 0])

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrix(mask: Mask, *, keys: int = KEYS) -> AttentionMatrix:
    q, k = normal(BATCH, HEADS, QUERIES, HEAD_DIM), normal(BATCH, HEADS, keys, HEAD_DIM, seed=1)
    return AttentionMatrix(q, k, mask=mask)


def assert_same_readings(a: AttentionMatrix, b: AttentionMatrix) -> None:
    for ours, expected in zip(a.tiles(with_lowest=True), b.tiles(with_lowest=True), strict=True):
        assert torch.equal(ours.allowed, expected.allowed)
        assert torch.equal(ours.lowest, expected.lowest)  # type: ignore[arg-type]
        assert torch.equal(ours.weights, expected.weights)
    some = normal(BATCH, a.shape[2]) > 0
    assert torch.equal(a.seen_by(some), b.seen_by(some))
    v = normal(BATCH, HEADS, a.shape[3], 7, seed=2)
    assert torch.equal(a @ v, b @ v)


@every_dtype
def test_lengths(dtype: torch.dtype) -> None:
    window = Mask.window(3, 2, align="top-left")
    of_dtype = Mask.lengths(keys=KEY_LENGTHS.to(dtype), queries=QUERY_LENGTHS.to(dtype))
    expected = Mask.lengths(keys=KEY_LENGTHS, queries=QUERY_LENGTHS)
    assert_same_readings(matrix(of_dtype & window), matrix(expected & window))
    shorter = Mask.lengths(keys=torch.tensor([3, 0, 29]))
    assert (of_dtype & shorter).draw() == (expected & shorter).draw()


@every_dtype
def test_segments(dtype: torch.dtype) -> None:
    ids = torch.arange(QUERIES)[None] // 5
    key_ids = torch.arange(KEYS)[None] // 6
    of_dtype = Mask.segments(ids.to(dtype), key_ids.to(dtype))
    assert_same_readings(matrix(of_dtype), matrix(Mask.segments(ids, key_ids)))


def test_segments_that_int64_cannot_hold_are_refused() -> None:
    ids = torch.tensor([[1, 2**63]], dtype=torch.uint64)  # in int64 the second is negative
    with pytest.raises(OptionError, match=r"segment ids of dtype torch\.uint64"):
        Mask.segments(ids)


@every_dtype
def test_rows_and_heads(dtype: torch.dtype) -> None:
    some = torch.tensor([5, 0, 3])
    a = matrix(Mask.causal(align="bottom-right"))
    assert torch.equal(a.rows(some.to(dtype)), a.rows(some))
    assert torch.equal(a.topk(2, queries=some.to(dtype))[1], a.topk(2, queries=some)[1])

    slopes, allowed = normal(HEADS).abs(), normal(HEADS, QUERIES, KEYS) > 0
    bias = ScoreBias.alibi(slopes, align="top-left")
    bias += ScoreBias.dense(normal(HEADS, KEYS), axes="heads keys")
    mask = Mask.may_attend(allowed, axes="heads queries keys")
    q, k = normal(BATCH, 3, QUERIES, HEAD_DIM), normal(BATCH, 3, KEYS, HEAD_DIM, seed=1)
    chosen, expected = (
        AttentionMatrix(q, k, mask=mask.of_heads(index), score_bias=bias.of_heads(index)).dense()
        for index in (some.to(dtype), some)
    )
    assert torch.equal(chosen, expected)


@every_dtype
def test_lengths_with_a_cache(dtype: torch.dtype) -> None:
    lengths, order = torch.tensor([9, 1, 4]), torch.tensor([2, 0, 2])
    layer = Attention(42, HEADS, window=(3, 0)).eval()
    x, step = normal(BATCH, 9, 42), normal(BATCH, 1, 42, seed=1)
    outputs = []
    for n, beams in ((lengths, order), (lengths.to(dtype), order.to(dtype))):
        cache = layer.cache(batch=BATCH, length=60)
        mask = Mask.causal() & Mask.lengths(queries=n, keys=n)
        with torch.no_grad():
            outputs += [layer(x, mask=mask, cache=cache)]
            outputs += [layer(step, mask=Mask.causal(), cache=cache.select(beams))]
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[3])


def test_a_window_whose_sides_are_integers_of_numpy_or_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as a user has it
    (band,) = Mask.window(np.uint8(200), torch.tensor(3, dtype=torch.int8)).clauses_of_kind(Band)
    assert band.sides == (200, 3)
    layer = Attention(42, HEADS, window=(np.uint8(200), 0))  # type: ignore[arg-type]
    assert layer.cache(batch=1, length=500)._k.shape[2] == 401  # twice the window, and one
    for side in (torch.tensor(-1), torch.tensor(1.5)):
        with pytest.raises(OptionError, match="left: a whole number from 0"):
            Mask.window(side, 0)


def test_an_offset_of_a_diagonal() -> None:
    a = matrix(Mask())
    for offset in (0, 1, 4):
        assert torch.equal(a.diagonal(np.uint8(offset)), a.diagonal(offset))


@every_dtype
def test_starts_of_packed_sequences(dtype: torch.dtype) -> None:
    # More tokens than int8 and uint8 hold: the places must not wrap either.
    q = normal(1, 2, 300, HEAD_DIM)
    starts = torch.tensor([0, 70, 120, 300 if torch.iinfo(dtype).max > 300 else 127])
    ours, expected = (
        attend(nn.Module(), q, q, q, None, is_causal=False, cu_seq_lens_q=s)[0]
        for s in (starts.to(dtype), starts)
    )
    assert torch.equal(ours, expected)


@every_dtype
def test_positions_and_tokens(dtype: torch.dtype) -> None:
    x, positions = normal(1, 2, 100, HEAD_DIM), torch.arange(27, 127)
    rotary = Rotary()
    assert torch.equal(rotary.rotate(x, positions.to(dtype)), rotary.rotate(x, positions))

    tokens, real = torch.tensor([[3, 0, 3, 0, 3]]), torch.ones(1, 5, dtype=torch.bool)
    assert RepeatedTokens(tokens.to(dtype), real).earlier.tolist() == [[0, 0, 1, 1, 2]]

    ids, rows = torch.tensor([[5, 9, 5, 7], [9, 5, 5, 5]]), torch.tensor([3, 1])
    narrow = planted.true_weights(ids, lengths=torch.tensor([4, 0]).to(dtype), rows=rows.to(dtype))
    wide = planted.true_weights(ids, lengths=torch.tensor([4, 0]), rows=rows)
    assert all(torch.equal(a, b) for a, b in zip(narrow, wide, strict=True))
