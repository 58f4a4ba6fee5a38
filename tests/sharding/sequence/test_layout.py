"""Layouts of a sequence over ranks: which positions each rank holds, and their way back."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from headwise.errors import OptionError, ShapeError
from headwise.sharding import SequenceLayout
from tests.sharding.ranks import ranks


def test_a_layout_by_hand() -> None:
    assert SequenceLayout.contiguous(7, 3).spans == (((0, 3),), ((3, 5),), ((5, 7),))
    # Six chunks of 7 tokens: 0 1 | 2 | 3 | 4 | 5 | 6; the middle ones of the last rank touch.
    zigzag = SequenceLayout.zigzag(7, 3)
    assert zigzag.spans == (((0, 2), (6, 7)), ((2, 3), (5, 6)), ((3, 5),))
    assert zigzag.positions(0).tolist() == [0, 1, 6]
    assert zigzag.lengths == (3, 2, 2)
    assert SequenceLayout.of_lengths([4, 0, 3]).spans == (((0, 4),), (), ((4, 7),))
    assert str(zigzag) == "a layout of 7 tokens over 3 ranks [3, 2, 2]"


@given(st.integers(0, 40), st.integers(1, 5), st.sampled_from(("contiguous", "zigzag")))
def test_every_position_is_on_one_rank(length: int, count: int, kind: str) -> None:
    layout: SequenceLayout = getattr(SequenceLayout, kind)(length, count)
    positions = [layout.positions(rank) for rank in range(count)]
    assert sorted(torch.cat(positions).tolist()) == list(range(length))
    assert tuple(map(len, positions)) == layout.lengths
    assert layout.length == length
    assert max(layout.lengths) - min(layout.lengths) <= 1 + (kind == "zigzag")
    x = torch.arange(3 * length).view(3, length)
    parts = [layout.split(x, rank, dim=1) for rank in range(count)]
    for part, local in zip(parts, positions, strict=True):
        assert torch.equal(part, x[:, local])
    by_rank = torch.cat(parts, 1)
    assert torch.equal(layout.to_sequence_order(by_rank, dim=1), x)
    assert torch.equal(layout.to_rank_order(x, dim=1), by_rank)


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_zigzag_balances_causal_work(count: int) -> None:
    for each in (64, 67, 100, 513):
        for length in range(count * each, count * (each + 1)):
            layout = SequenceLayout.zigzag(length, count)
            work = [int((layout.positions(rank) + 1).sum()) for rank in range(count)]
            assert max(work) <= 1.1 * min(work)
    contiguous = SequenceLayout.contiguous(64 * count, count)
    work = [int((contiguous.positions(rank) + 1).sum()) for rank in range(count)]
    assert max(work) > 1.1 * min(work)  # or the test could not fail


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SequenceLayout.contiguous(-1, 2), "-1 tokens over 2 ranks"),
        (lambda: SequenceLayout.zigzag(8, 0), "8 tokens over 0 ranks"),
        (lambda: SequenceLayout.zigzag(2.5, 2), "2.5 tokens"),
        (lambda: SequenceLayout.of_lengths([3, -1]), r"of_lengths\(\[3, -1\]\)"),
        (lambda: SequenceLayout.of_lengths([]), r"of_lengths\(\[\]\)"),
        (lambda: SequenceLayout.zigzag(8, 2).gather(torch.ones(8, 3), None), "without a process"),
    ],
)
@pytest.mark.usefixtures("shapes_unchecked")
def test_what_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        call()


def test_another_length_is_refused() -> None:
    layout = SequenceLayout.zigzag(8, 2)
    for x, dim in ((torch.ones(7, 3), 0), (torch.ones(8, 3), 2)):
        with pytest.raises(ShapeError, match="8 tokens: the whole sequence") as caught:
            layout.split(x, 0, dim=dim)
        assert f"dim={dim}" in str(caught.value)


def gather_parts(kind: str, length: int) -> list[bool]:
    """Gather a tensor and its gradient; return whether both are those of the whole."""
    rank, count = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (count,))
    layout: SequenceLayout = getattr(SequenceLayout, kind)(length, count)
    x = torch.arange(2.0 * length * 3).view(2, length, 3)
    part = layout.split(x, rank).clone().requires_grad_()
    whole = layout.gather(part, mesh)
    (gradient,) = torch.autograd.grad((whole * x * (rank + 1)).sum(), part)
    total = sum(range(1, count + 1))
    try:
        layout.gather(torch.ones(2, length + 1, 3), mesh)
    except ShapeError as error:
        refused = f"rank {rank} of a layout" in str(error)
    return [torch.equal(whole, x), torch.equal(gradient, total * layout.split(x, rank)), refused]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_gather_is_the_whole_sequence_with_its_gradient(count: int) -> None:
    for kind in ("contiguous", "zigzag"):
        for length in (13, 8, 1):
            assert ranks(count).run(gather_parts, kind, length) == [[True] * 3] * count
