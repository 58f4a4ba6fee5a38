"""Maps that make one kv head of several: their cost by hand, and the least there is."""

import itertools

import pytest
import torch
from torch import Tensor

from headwise.surgery.maps import Channels, Group, How, Maps, cost, fit, select
from headwise.surgery.merge import group_alike

HEADS, CHANNELS, TOKENS = 3, 4, 29
DTYPES = {"real": torch.float64, "complex": torch.complex128}
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def samples(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Channels x (tokens, heads, channels) of a group, and readers (heads, 6, channels) of each."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, HEADS, CHANNELS, generator=generator, dtype=dtype)
    mixed = torch.randn(HEADS * CHANNELS, HEADS * CHANNELS, generator=generator, dtype=dtype)
    readers = torch.randn(HEADS, 6, CHANNELS, generator=generator, dtype=dtype)
    return (x.flatten(1) @ mixed).unflatten(1, (HEADS, CHANNELS)), readers


def group_of(x: Tensor, readers: Tensor) -> Group:
    moments = torch.einsum("tia,tjb->ijab", x, x.conj()) / len(x)
    return Group(moments, torch.einsum("nra,nrb->nab", readers.conj(), readers))


def cost_by_hand(x: Tensor, readers: Tensor, maps: Maps) -> float:
    """The mean over tokens of the squares of what all readers of all heads read wrongly."""
    new = sum(x[:, j] @ maps.to[j].mT for j in range(HEADS))
    wrong = torch.stack([new @ maps.back[j].mT - x[:, j] for j in range(HEADS)], 1)
    return float(torch.einsum("nra,tna->tnr", readers, wrong).abs().square().sum()) / len(x)


@dtypes
@pytest.mark.parametrize("how", ["mean", "aligned", "fitted"])
def test_the_cost_is_that_of_the_tokens(dtype: torch.dtype, how: How) -> None:
    x, readers = samples(dtype)
    group = group_of(x, readers)
    maps = fit(group, how)
    assert float(cost(group, maps)) == pytest.approx(cost_by_hand(x, readers, maps), rel=1e-10)


@dtypes
def test_the_fitted_maps_lose_what_the_other_principal_components_hold(dtype: torch.dtype) -> None:
    x, readers = samples(dtype)
    group = group_of(x, readers)
    read = torch.einsum("nra,tna->tnr", readers, x).flatten(1)  # what is read, (tokens, heads * 6)
    lost = torch.linalg.svdvals(read)[CHANNELS:].square().sum() / len(x)
    assert float(cost(group, fit(group, "fitted"))) == pytest.approx(float(lost), rel=1e-9)


@dtypes
def test_no_other_maps_lose_less(dtype: torch.dtype) -> None:
    x, readers = samples(dtype)
    group = group_of(x, readers)
    maps = fit(group, "fitted")
    least = float(cost(group, maps))
    assert least < float(cost(group, fit(group, "aligned")))
    generator = torch.Generator().manual_seed(1)
    for size in (1e-1, 1e-3):
        moved = [
            each + size * torch.randn(each.shape, generator=generator, dtype=dtype) for each in maps
        ]
        assert float(cost(group, Maps(*moved))) > least


@dtypes
def test_turned_copies_lose_nothing_after_a_turn(dtype: torch.dtype) -> None:
    x, readers = samples(dtype)
    generator = torch.Generator().manual_seed(2)
    matrices = torch.randn(HEADS, CHANNELS, CHANNELS, generator=generator, dtype=dtype)
    turns = torch.linalg.qr(matrices)[0]
    group = group_of(torch.einsum("nab,tb->tna", turns, x[:, 0]), readers)
    whole = float(torch.einsum("nab,nba->", group.weights, group.moments[range(3), range(3)]).real)
    rounding = 1e3 * torch.finfo(torch.float64).eps * whole
    assert float(cost(group, fit(group, "aligned"))) < rounding
    assert float(cost(group, fit(group, "fitted"))) < rounding
    assert float(cost(group, fit(group, "mean"))) > 0.1 * whole


def test_what_no_query_reads_costs_nothing() -> None:
    x, readers = samples(torch.float64)
    readers[:, :, 3] = 0  # and a map must not divide by it
    group = group_of(x, readers)
    maps = fit(group, "fitted")
    assert all(bool(each.isfinite().all()) for each in maps)
    read = torch.einsum("nra,tna->tnr", readers, x).flatten(1)
    lost = torch.linalg.svdvals(read)[CHANNELS:].square().sum() / len(x)
    assert float(cost(group, maps)) == pytest.approx(float(lost), rel=1e-9)


def test_groups_are_fitted_side_by_side() -> None:
    """Several sets of channels and several groups at once are each of them alone."""
    parts = [group_of(*samples(torch.float64, seed)) for seed in (3, 4)]
    both = Channels(
        torch.stack([part.moments for part in parts]),
        torch.stack([part.weights for part in parts]),
        torch.arange(2 * CHANNELS).view(2, CHANNELS),
    )
    pairs = torch.tensor([[0, 2], [1, 0]])
    for how in ("mean", "aligned", "fitted"):
        chosen = select(both, pairs)
        costs = cost(chosen, fit(chosen, how))
        for part, pair in itertools.product(range(2), range(2)):
            heads = pairs[pair]
            alone = Group(parts[part].moments[heads[:, None], heads], parts[part].weights[heads])
            expected = float(cost(alone, fit(alone, how)))
            assert float(costs[part, pair]) == pytest.approx(expected, rel=1e-9)


def test_heads_that_cost_nothing_together_are_a_group() -> None:
    planted = [[0, 5], [1, 3], [2, 7], [4, 6]]
    generator = torch.Generator().manual_seed(0)
    costs = torch.rand(8, 8, generator=generator, dtype=torch.float64) + 1
    costs = costs + costs.mT
    for a, b in planted:
        costs[a, b] = costs[b, a] = 0.0
    assert group_alike(costs, 2) == planted


def test_no_exchange_of_two_heads_saves_more() -> None:
    generator = torch.Generator().manual_seed(5)
    costs = torch.rand(9, 9, generator=generator, dtype=torch.float64)
    costs = costs + costs.mT

    def total(groups: list[list[int]]) -> float:
        pairs = (pair for group in groups for pair in itertools.combinations(group, 2))
        return sum(float(costs[a, b]) for a, b in pairs)

    groups = group_alike(costs, 3)
    assert sorted(itertools.chain(*groups)) == [*range(9)]
    assert total(groups) < total([[0, 1, 2], [3, 4, 5], [6, 7, 8]])
    for (i, j), a, b in itertools.product(itertools.combinations(range(3), 2), range(3), range(3)):
        swapped = [list(group) for group in groups]
        swapped[i][a], swapped[j][b] = swapped[j][b], swapped[i][a]
        assert total(swapped) >= total(groups) - 1e-12
