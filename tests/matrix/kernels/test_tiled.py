"""The tiled kernel: any tiling, its memory, its gradient, its numerics, and the operator."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headwise.function import stages
from headwise.masks.clause import MatrixPart, Span
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from headwise.matrix.kernels import dense, tiled, tiled_op, tiles
from headwise.matrix.kernels.kernel import KernelInput, KernelResult, Requested, Task
from headwise.matrix.kernels.tiled import UpstreamGradients
from headwise.matrix.operator import AttentionMatrix
from tests import strategies
from tests.memory import LargestTensor

EVERYTHING = Requested(entropy=True, received=True, average=True, query_blocks=5, key_blocks=7)


def bound(p: strategies.Problem) -> KernelInput:
    """A drawn problem as kernels are given it."""
    return AttentionMatrix(p.q, p.k, **p.kwargs)._kernel_input()


@given(strategies.problems())
@settings(max_examples=60)
def test_every_tiling_reads_the_same(p: strategies.Problem) -> None:
    problem, y = bound(p), torch.randn(*p.q.shape[:3], 3, dtype=torch.float64)
    expected = dense.dense_result(problem, p.v, y, EVERYTHING)
    for elements in (1, 100, 1000, 2**20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiles, "TILE_ELEMENTS", elements)
            found = tiled.compute_results(problem, p.v, y, EVERYTHING)
        for name, a, b in zip(KernelResult._fields, found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, msg=f"{name} at {elements}")


@pytest.mark.slow
@given(strategies.problems())
@settings(max_examples=40)
def test_every_tiling_has_the_gradient_of_the_written_down_arithmetic(
    p: strategies.Problem,
) -> None:
    y = torch.randn(*p.q.shape[:3], 3, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in (p.q, p.k, p.v, y)]
    options = dict(p.kwargs)
    if p.sink is not None:
        options["sink"] = p.sink.clone().requires_grad_()
        leaves.append(options["sink"])
    if p.score_bias is not None:
        biases = [x.clone().requires_grad_() for x in p.score_bias.tensors]
        options["score_bias"] = ScoreBias(p.score_bias.by_distance, tuple(biases))
        leaves += biases
    problem = AttentionMatrix(leaves[0], leaves[1], **options)._kernel_input()
    generator = torch.Generator().manual_seed(1)

    def gradients(readings: KernelResult) -> tuple[Tensor, ...]:
        # The peak's gradient alone is left to gradcheck: log_sum's is defined with it held fixed.
        fields = [f for n, f in zip(KernelResult._fields, readings, strict=True) if n in COMPARED]
        generator.manual_seed(1)
        upstream = [torch.randn(f.shape, generator=generator, dtype=f.dtype) for f in fields]
        return torch.autograd.grad(fields, leaves, upstream, allow_unused=True)

    expected = gradients(dense.dense_result(problem, leaves[2], leaves[3], EVERYTHING))
    for elements in (50, 2**20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiles, "TILE_ELEMENTS", elements)
            found = gradients(
                tiled_op.TiledKernel().run(Task(problem, leaves[2], leaves[3], EVERYTHING))
            )
        for a, b in zip(found, expected, strict=True):
            b = torch.zeros_like(a) if b is None else b
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


COMPARED = ("out", "transposed", "log_sum", "entropy", "received", "average", "cells")


def test_a_tile_that_is_hidden_whole_still_gives_its_sink_a_gradient() -> None:
    q, k = torch.randn(1, 4, 300, 8), torch.randn(1, 4, 2, 8)
    sink = torch.zeros(4, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE_ELEMENTS", 100)
        matrix = AttentionMatrix(q, k, mask=Mask.causal(align="bottom-right"), sink=sink)
        found = matrix.statistics()
        # 298 queries see the sink alone: their logsumexp is the sink.
        (alone,) = torch.autograd.grad(found.logsumexp[:, :, :298].sum(), sink, retain_graph=True)
        (gradient,) = torch.autograd.grad(found.maximum.sum(), sink)
    torch.testing.assert_close(alone, torch.full((4,), 298.0))
    assert bool((gradient < 0).all())


@given(strategies.problems(), st.integers(0, 33))
@settings(max_examples=30)
def test_parts_by_keys_have_the_gradient_of_the_whole(p: strategies.Problem, first: int) -> None:
    problem = bound(replace(p, sink=None))
    whole = tiled.compute_results(problem, p.v, None, Requested())
    upstream = torch.randn(whole.out.shape, dtype=torch.float64)
    needs = (problem.bias.table is not None, [True] * len(problem.bias.tensors))

    def backward(problem: KernelInput, v: Tensor, means: Tensor | None) -> tiled.Gradients:
        gradients = UpstreamGradients(upstream, *[None] * 7, row_means=means)
        statistics = (whole.peak, whole.log_sum)
        return tiled.compute_gradients(problem, v, None, statistics, gradients, needs)

    expected = backward(problem, p.v, None)
    batch, _, queries, keys = p.shape
    means = (upstream * whole.out).sum(-1)
    parts = []
    for span in (Span(0, min(first, keys)), Span(min(first, keys), keys)):
        place = MatrixPart(Span(0, batch), Span(0, queries), span)
        if span.size:
            k, v = (x[:, :, span.first : span.stop] for x in (p.k, p.v))
            mask, bias = problem.mask.cut_to_part(place), problem.bias.cut_to_part(place)
            parts.append(backward(replace(problem, k=k, mask=mask, bias=bias), v, means))
    near = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-10)
    near(sum(part.q for part in parts), expected.q)
    near(torch.cat([part.k for part in parts], 2), expected.k)
    near(torch.cat([part.v for part in parts], 2), expected.v)


# ---- memory ----------------------------------------------------------------------------------


def long_problem(length: int = 3000) -> KernelInput:
    q = torch.randn(1, 2, length, 8)
    slopes = torch.tensor([0.1, 0.2])
    return AttentionMatrix(
        q, q, mask=Mask.causal(), score_bias=ScoreBias.alibi(slopes), softcap=9.0, sink=slopes
    )._kernel_input()


def test_no_tensor_is_larger_than_a_tile() -> None:
    problem, v = long_problem(), torch.randn(1, 2, 3000, 5)
    wanted = Requested(entropy=True, received=True, query_blocks=1, key_blocks=3000)
    tile_bytes = tiles.TILE_ELEMENTS * 4
    with LargestTensor() as forward:
        readings = tiled.compute_results(problem, v, v, wanted)
    assert forward.bytes <= tile_bytes, forward.name
    upstream = UpstreamGradients(*(x if x.numel() else None for x in readings))
    with LargestTensor() as backward:
        tiled.compute_gradients(
            problem, v, v, (readings.peak, readings.log_sum), upstream, (True, [])
        )
    # Summing the diagonals of a bias by distance skews the tile to rows + columns columns.
    assert backward.bytes <= 2 * tile_bytes, backward.name
    assert 2 * tile_bytes < 2 * 3000 * 3000 * 4  # or the test could not fail


def test_a_window_reads_only_keys_near_its_diagonal() -> None:
    q = torch.randn(1, 2, 4096, 8)
    problem = AttentionMatrix(q, q, mask=Mask.window(64, 0))._kernel_input()
    cells = 0
    for tile in tiles.plan_tiles(problem):
        batches, kv_heads, group, rows, columns = tile.axis_sizes(1)
        cells += batches * kv_heads * group * rows * columns
    assert cells < 4 * 2 * 4096 * 65


# ---- numerics --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1.0, 50.0, 500.0])
def test_entropy_is_never_negative_and_exact_at_large_scores(size: float) -> None:
    q, k = torch.randn(2, 3, 40, 16), torch.randn(2, 3, 300, 16)
    scale = size / float((q @ k.mT).abs().max())
    exact = AttentionMatrix(q.double(), k.double(), scale=scale).entropy()
    found = AttentionMatrix(q, k, scale=scale).entropy()
    assert float(found.min()) >= 0
    # lse - sum p s would be wrong by about eps * size * a few: 1e-4 at 500. Scores themselves
    # carry eps * size / 2, which is what is granted here, four times.
    assert float((found - exact).abs().max()) <= 4 * size * 2**-24 + 2**-20


def test_rows_sum_to_one_at_large_scores() -> None:
    q = torch.randn(1, 2, 50, 16) * 20
    k = torch.randn(1, 2, 70, 16) * 20
    ones = torch.ones(1, 1, 70, 1)
    capped = AttentionMatrix(q, k, softcap=1e4)  # the softcap sends it to the tiled kernel
    assert float(((capped @ ones) - 1).abs().max()) <= 70 * 2**-24


def test_a_common_offset_of_the_scores_changes_nothing() -> None:
    q, k = torch.randn(1, 2, 30, 8), torch.randn(1, 2, 31, 8)
    shift = ScoreBias.dense(torch.full((1,), 4096.0), axes="heads")
    plain, moved = AttentionMatrix(q, k), AttentionMatrix(q, k, score_bias=shift)
    # Adding 4096 rounds each score to 2**-11 / 2.
    assert float((plain.entropy() - moved.entropy()).abs().max()) < 30 * 2**-12
    assert float(moved.entropy().min()) >= 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_finite_input_gives_no_nan(dtype: torch.dtype) -> None:
    largest = 3e4 if dtype == torch.float16 else 1e15
    q = torch.randn(2, 2, 9, 4).sign().mul(largest).to(dtype).requires_grad_()
    k = torch.randn(2, 2, 11, 4).sign().mul(largest).to(dtype).requires_grad_()
    matrix = AttentionMatrix(q, k, mask=Mask.lengths(keys=torch.tensor([0, 5])))
    found = matrix.statistics()
    read = [matrix @ k, *found[1:], matrix.head_average(), matrix.diagonal(1)]
    assert not any(x.isnan().any() for x in read)
    torch.stack([x.float().sum() for x in read[1:]]).sum().backward()
    assert q.grad is not None
    assert bool(q.grad.isfinite().all())


# ---- small parts -----------------------------------------------------------------------------


def test_sum_diagonals_by_hand() -> None:
    block = torch.tensor([[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]])
    # column - row = -1: 4;  0: 1 + 5;  1: 2 + 6;  2: 3
    assert tiles.sum_diagonals(block).tolist() == [[4.0, 6.0, 8.0, 3.0]]


def test_the_floor_has_weight_zero() -> None:
    for dtype in (torch.float32, torch.float64):
        floor = torch.tensor(tiled.least_shifted_score(dtype), dtype=dtype)
        assert floor.exp().item() == 0.0
        assert (floor * tiled.LOG2_E).exp2().item() == 0.0
    assert math.isclose(tiled.LOG2_E, 1 / math.log(2))


def test_pack_and_unpack_are_inverse() -> None:
    p = strategies.problem(3)
    ids, key_ids = torch.zeros(3, 24, dtype=torch.long), torch.ones(3, 29, dtype=torch.long)
    mask = Mask.window(3, 1, align="top-left") & Mask.segments(ids, key_ids)
    mask &= Mask.where(lambda batch, head, query, key: key != query) & Mask.prefix(7)
    mask = mask.aligned("bottom-right") & Mask.lengths(keys=torch.tensor([29, 7, 11]), side="left")
    q, k = torch.randn(3, 6, 24, 10), torch.randn(3, 2, 29, 10)
    problem = AttentionMatrix(q, k, mask=mask, softcap=2.0, sink=torch.zeros(6))._kernel_input()
    again = tiled_op.unpack_arguments(tiled_op.pack_arguments(problem))
    for name in ("q", "k", "scale", "softcap", "sink"):
        assert getattr(again, name) is getattr(problem, name)
    assert again.mask.sizes == problem.mask.sizes
    assert len(again.mask.clauses) == 5
    for clause, lifted in zip(problem.mask.clauses, again.mask.clauses, strict=True):
        assert type(lifted) is type(clause)
        for name, value in vars(clause).items():
            assert getattr(lifted, name) is value or getattr(lifted, name) == value
    assert len(tiled_op.pack_arguments(bound(p))) == tiled_op.COUNT


@pytest.mark.parametrize("options", ["plain", "everything"])
def test_the_operator_is_well_formed(options: str) -> None:
    q, k, v = (torch.randn(2, 2, 6, 3, requires_grad=True) for _ in range(3))
    kwargs = {}
    if options == "everything":
        kwargs = {
            "mask": Mask.window(3, 1) & Mask.lengths(keys=torch.tensor([6, 2])),
            "score_bias": ScoreBias.dense(torch.randn(2, 6, 6), axes="heads queries keys"),
            "sink": torch.zeros(2, requires_grad=True),
        }
    problem = AttentionMatrix(q, k, **kwargs)._kernel_input()
    arguments = (*tiled_op.pack_arguments(problem), v, v, True, True, True, 4, 5)
    # Schema, fake tensors and autograd registration, as torch itself checks them.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.headwise.sweep.default, arguments, test_utils=checks)


def test_the_oracle_agrees_with_the_reference() -> None:
    p = strategies.problem(11, softcap=None, sink=None)
    found = dense.dense_result(bound(p), p.v, None, EVERYTHING)
    torch.testing.assert_close(found.out, stages.head_outputs(p.q, p.k, p.v, **p.kwargs))
