"""Maps of many cells: sums inside the tiles, their gradients, and no wide product."""

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from headwise.function.budget import Budget
from headwise.masks.mask import Mask
from headwise.matrix import operator as module
from headwise.matrix.kernels import tiles
from headwise.matrix.operator import AttentionMatrix
from tests.memory import LargestTensor
from tests.strategies import DTYPES, Problem, problems


def written_down(w: Tensor, queries: int, keys: int) -> Tensor:
    """The map of dense weights, by the members of each block."""
    rows, columns = (
        (torch.arange(length) * blocks // length == torch.arange(blocks)[:, None]).to(w.dtype)
        for length, blocks in ((w.shape[2], queries), (w.shape[3], keys))
    )
    return (rows @ w @ columns.mT) / rows.sum(1)[:, None]


@pytest.fixture(params=[0, 10**6], ids=["tiles", "product"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every map by the tiles, or every map by a product."""
    monkeypatch.setattr(module, "SMALL_MAP", request.param)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_ways_are_within_the_budget(dtype: torch.dtype) -> None:
    @given(problems(dtypes=(dtype,)))
    @settings(max_examples=3)
    def holds(p: Problem) -> None:
        _, _, queries, keys = p.shape
        for size in ((queries, keys), (1, keys), (min(queries, 3), min(keys, 2))):
            budget = Budget.for_weights(
                p.q, p.k, read=lambda w, size=size: written_down(w, *size), **p.kwargs
            )
            budget.assert_holds(AttentionMatrix(p.q, p.k, **p.kwargs).pool(*size))

    holds()


@pytest.mark.parametrize("elements", [100, 3000])
@pytest.mark.parametrize("size", [(5, 3), (2, 131), (24, 290)])
def test_blocks_that_a_tile_cuts(
    size: tuple[int, int], elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long and short blocks of 290 keys, which no tile of a window and no run of rows respects."""
    monkeypatch.setattr(module, "SMALL_MAP", 0)
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", elements)
    q, k = (torch.randn(2, h, n, 5, dtype=torch.float64) for h, n in ((4, 24), (2, 290)))
    for mask in (Mask(), Mask.window(140, 9, align="bottom-right")):
        matrix = AttentionMatrix(q, k, mask=mask)
        read = lambda w: written_down(w, *size)  # noqa: E731
        Budget.for_weights(q, k, read=read, mask=mask).assert_holds(matrix.pool(*size))


def test_the_gradient_and_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALL_MAP", 0)
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 30)
    leaves = [
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 2, 5, 3), (2, 1, 7, 3), (2,))
    ]

    def pooled(q: Tensor, k: Tensor, sink: Tensor) -> Tensor:
        # The first two queries see no key, only the sink.
        mask = Mask.causal(align="bottom-right") & Mask.may_attend(torch.arange(7) > 3, axes="keys")
        return AttentionMatrix(q, k, mask=mask, softcap=1.7, sink=sink).pool(3, 4)

    assert gradcheck(pooled, leaves, fast_mode=True)
    assert gradgradcheck(pooled, leaves, fast_mode=True)


@pytest.mark.parametrize("size", [(1, 800), (800, 1), (90, 70)])
def test_no_map_takes_a_product_as_wide_as_itself(size: tuple[int, int]) -> None:
    q = torch.randn(1, 2, 800, 8, requires_grad=True)
    with LargestTensor() as seen:
        pooled = AttentionMatrix(q, q, mask=Mask.causal()).pool(*size)
        pooled.square().sum().backward()
    # The operator itself is opaque here; tests/matrix/kernels/test_tiled.py looks into it.
    assert seen.bytes <= 4 * max(pooled.numel(), q.numel()), seen.name


@pytest.mark.parametrize(("length", "blocks"), [(29, 5), (24, 24), (7, 3), (290, 131)])
def test_the_sizes_of_blocks(length: int, blocks: int) -> None:
    index = torch.arange(length) * blocks // length
    counts = torch.bincount(index, minlength=blocks)
    assert torch.equal(tiles.block_sizes(length, blocks, index), counts)
    whole = tiles.BlockMap(slice(0, length), length, blocks)
    assert (whole.touched_blocks, whole.positions_per_block()) == (
        slice(0, blocks),
        counts.tolist(),
    )
    part = tiles.BlockMap(slice(2, length - 1), length, blocks)
    found = torch.arange(part.touched_blocks.start, part.touched_blocks.stop).repeat_interleave(
        torch.tensor(part.positions_per_block())
    )
    assert torch.equal(found, index[2:-1])
    assert torch.equal(part.index(index) + part.touched_blocks.start, index[2:-1])
