"""A padded or packed matrix taken one sequence at a time: which pieces, and the same function."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headwise import AttentionMatrix, Mask, ScoreBias
from headwise.function import stages
from headwise.masks.clause import Rectangle, Span
from headwise.masks.clauses import segments
from headwise.matrix.kernels import varlen
from headwise.testing import Budget
from tests.honest import normal
from tests.memory import LargestTensor

BATCH, HEADS, QUERIES, KEYS = 3, 6, 24, 29
LENGTHS, KEY_LENGTHS = torch.tensor([24, 5, 0]), torch.tensor([29, 0, 11])
IDS = torch.tensor([[0] * 4 + [-1] * 3 + [5] * 16 + [9]])
KEY_IDS = torch.tensor([[5] * 9 + [3] * 2 + [0] * 15 + [-1] * 3])
IDS_OF_KEYS = torch.tensor([[5] * 20 + [0] * 9])
SCATTERED = torch.tensor([[0] * 4 + [1] * 10 + [0] * 10])


def found(mask: Mask, *, keys: int = KEYS, batch: int = BATCH) -> list[tuple[int, Any, Any]]:
    bound = mask.bind(
        batch=batch, heads=HEADS, queries=QUERIES, keys=keys, device=torch.device("cpu")
    )
    division = bound.rectangles_of_allowed_pairs()
    rectangles = () if division is None else division.rectangles
    return [(p.batch, tuple(p.queries), tuple(p.keys)) for p in rectangles]


def test_lengths_are_one_rectangle_a_sequence() -> None:
    assert found(Mask.lengths(queries=LENGTHS)) == [(0, (0, 24), (0, 29)), (1, (0, 5), (0, 29))]
    assert found(Mask.lengths(keys=KEY_LENGTHS)) == [(0, (0, 24), (0, 29)), (2, (0, 24), (0, 11))]
    assert found(Mask.lengths(queries=LENGTHS, keys=KEY_LENGTHS)) == [(0, (0, 24), (0, 29))]


def test_segments_are_one_rectangle_each() -> None:
    mask = Mask.segments(IDS, KEY_IDS)
    assert found(mask, batch=1) == [(0, (0, 4), (11, 26)), (0, (7, 23), (0, 9))]
    # One row of ids is that of every sequence.
    assert len(found(mask)) == 3 * 2
    shorter = mask & Mask.lengths(queries=torch.tensor([20]), keys=torch.tensor([12]))
    assert found(shorter, batch=1) == [(0, (0, 4), (11, 12)), (0, (7, 20), (0, 9))]


def test_a_scattered_segment_is_no_rectangle() -> None:
    assert found(Mask.segments(SCATTERED), keys=QUERIES) == []
    assert found(Mask.segments(IDS, torch.tensor([[5, 0, 5] + [0] * 26]))) == []


MASKS: dict[str, tuple[Mask, int]] = {
    "key lengths": (Mask.lengths(keys=KEY_LENGTHS), KEYS),
    "both": (Mask.lengths(queries=LENGTHS, keys=KEY_LENGTHS), KEYS),
    "causal": (Mask.lengths(keys=KEY_LENGTHS) & Mask.causal(align="bottom-right"), KEYS),
    "window": (Mask.segments(IDS) & Mask.window(3, 1), QUERIES),
    "left-padded": (
        Mask.lengths(keys=KEY_LENGTHS, side="left") & Mask.prefix(3, align="bottom-right"),
        KEYS,
    ),
    "where": (
        Mask.starts(queries=LENGTHS // 2, keys=KEY_LENGTHS // 2)
        & Mask.where(lambda batch, head, query, key: (batch + head + query + key) % 3 > 0),
        KEYS,
    ),
    "two packings": (
        Mask.segments(IDS, KEY_IDS) & Mask.segments(KEY_IDS[:, :24], IDS_OF_KEYS),
        KEYS,
    ),
    "scattered": (
        Mask.segments(SCATTERED, SCATTERED.new_zeros(1, KEYS)) & Mask.lengths(keys=KEY_LENGTHS),
        KEYS,
    ),
    "segments": (Mask.segments(IDS, KEY_IDS) & Mask.window(20, 9, align="top-left"), KEYS),
    "dense": (
        Mask.segments(IDS, KEY_IDS)
        & Mask.may_attend(torch.rand(BATCH, QUERIES, KEYS) > 0.3, axes="batch queries keys"),
        KEYS,
    ),
}


def biases(keys: int) -> dict[str, ScoreBias | None]:
    align = "top-left"
    return {
        "none": None,
        "alibi": ScoreBias.alibi(torch.rand(HEADS), align=align),
        "learned": ScoreBias.relative(normal(HEADS, 9).requires_grad_(), align=align),
        "dense": ScoreBias.dense(normal(BATCH, 1, QUERIES, keys), axes="batch heads queries keys"),
    }


@pytest.mark.parametrize("bias", ["none", "alibi", "learned", "dense"])
@pytest.mark.parametrize(("mask", "keys"), MASKS.values(), ids=MASKS)
def test_pieces_are_the_reference(
    mask: Mask, keys: int, bias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "CALL", 1)
    q, k, v = (
        normal(BATCH, HEADS, QUERIES, 10),
        normal(BATCH, 2, keys, 10),
        normal(BATCH, 2, keys, 7),
    )
    leaves = [t.requires_grad_() for t in (q, k, v)]
    options: dict[str, Any] = {"mask": mask, "score_bias": biases(keys)[bias]}
    if bias == "learned":
        leaves.append(options["score_bias"].by_distance[0].given)
    matrix = AttentionMatrix(q, k, **options)
    assert matrix.explain(v).lines[0].kernel == "pieces"
    out, expected = matrix @ v, stages.head_outputs(q, k, v, **options)
    with torch.no_grad():
        Budget.for_head_outputs(q, k, v, **options).assert_holds(out)
    upstream = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, upstream)
    wanted = torch.autograd.grad(expected, leaves, upstream)
    for gradient, own in zip(grads, wanted, strict=True):
        terms = BATCH * HEADS * (QUERIES + keys + 17)
        limit = terms * torch.finfo(torch.float64).eps * float(own.abs().max())
        assert (gradient - own).abs().max() <= limit


def test_reading_the_lengths_must_be_worth_it() -> None:
    q, k, v = (
        normal(BATCH, HEADS, QUERIES, 10),
        normal(BATCH, 2, KEYS, 10),
        normal(BATCH, 2, KEYS, 7),
    )
    matrix = AttentionMatrix(q, k, mask=Mask.lengths(keys=KEY_LENGTHS))
    assert matrix.explain(v).lines[0].kernel == "sdpa"
    long = torch.randn(2, 1, 2048, 16)
    told = AttentionMatrix(long, long, mask=Mask.lengths(keys=torch.tensor([2048, 100])))
    line = told.explain(long).lines[0]
    assert line.kernel == "pieces"
    assert line.operations == 2 * 2048 * (2048 + 100) * (16 + 16)
    hidden = AttentionMatrix(long, long, mask=Mask.lengths(keys=torch.tensor([2048, 2040])))
    assert hidden.explain(long).lines[0].kernel == "sdpa"


def test_a_cut_is_in_the_order_asked_for() -> None:
    x = torch.arange(20.0).view(1, 1, 20, 1)
    parts = varlen.cut_tensor_into_spans(x, [Span(12, 15), Span(0, 3), Span(15, 16)], dim=2)
    assert [part.flatten().tolist() for part in parts] == [[12, 13, 14], [0, 1, 2], [15]]
    assert Rectangle(0, Span(2, 5), Span(7, 3)).cell_count == 0


def test_the_memory_is_that_of_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed into one row, 16 sequences of 512 never make a tensor of 8,192 x 8,192."""
    # What watches the memory would also keep the lengths from being read.
    monkeypatch.setattr(segments, "may_read_values", lambda _: True)
    q = torch.randn(1, 2, 8192, 16, requires_grad=True)
    ids = torch.arange(16).repeat_interleave(512)[None]
    with LargestTensor() as seen:
        out: Tensor = AttentionMatrix(q, q, mask=Mask.segments(ids) & Mask.window(100, 0)) @ q
        out.sum().backward()
    assert seen.bytes <= 4 * max(2 * 8192 * 16, 2 * 512 * 512), seen.name


def test_pieces_that_other_segments_divide_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "CALL", 1)
    ids = (
        (
            [[0, 0, 1, -1, -1, -1], [-1, 0, -1, 1, 1, 1]],
            [[1, 1, 1, 0, -1, -1], [1, 1, 1, 1, -1, 0]],
        ),
        (
            [[1, -1, 0, 0, 0, -1], [-1, 1, -1, -1, 1, -1]],
            [[-1, -1, 1, 0, -1, 0], [1, -1, -1, -1, 1, 1]],
        ),
    )
    first, second = (Mask.segments(*map(torch.tensor, pair)) for pair in ids)
    q, k, v = torch.randn(3, 2, 3, 6, 4).unbind()
    matrix = AttentionMatrix(q, k, mask=first & second)
    Budget.for_head_outputs(q, k, v, mask=first & second).assert_holds(matrix @ v)
