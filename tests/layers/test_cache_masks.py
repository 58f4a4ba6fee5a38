"""Every kind of mask with a cache: it hides the same keys in one call, in chunks and in steps."""

import copy
from collections.abc import Callable
from itertools import accumulate, combinations, pairwise

import pytest
import torch
from torch import Tensor

from headwise import Attention, HeadwiseError, Mask
from headwise.testing import Budget

EMBED, HEADS, LENGTH = 40, 6, 13
SCHEDULES = {"at once": (LENGTH,), "one by one": (1,) * LENGTH, "chunks": (5, 1, 4, 3)}
SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, -1, 2]])
OFFSETS = torch.tensor([0, 3, 8, 12])
HIDDEN_KEYS = torch.arange(LENGTH) % 4 != 2
HIDDEN_PAIRS = (torch.arange(LENGTH)[:, None] + 2 * torch.arange(LENGTH)) % 5 != 1

# The mask of a call whose queries are the tokens [first, stop), and whose keys are all before stop.
CLAUSES: dict[str, Callable[[int, int], Mask]] = {
    "causal": lambda first, stop: Mask.causal(),
    "window": lambda first, stop: Mask.window(3, 0),
    "window of later keys": lambda first, stop: Mask.window(6, 2),
    "prefix": lambda first, stop: Mask.prefix(2),
    "where": lambda first, stop: Mask.where(lambda b, h, q, k: ((k + h) % 3 != 0) & (k <= q)),
    "keys": lambda first, stop: Mask.may_attend(HIDDEN_KEYS[:stop], axes="keys"),
    "pairs": lambda first, stop: Mask.may_attend(
        HIDDEN_PAIRS[first:stop, :stop], axes="queries keys"
    ),
    "segments": lambda first, stop: Mask.segments(SEGMENTS[:, first:stop], SEGMENTS[:, :stop]),
    "packed": lambda first, stop: Mask.packed(
        (OFFSETS - first).clamp(0, stop - first), OFFSETS.clamp(max=stop)
    ),
}
RELATIVE = {"causal", "window", "window of later keys"}
PAIRS = [(name,) for name in CLAUSES] + list(combinations(CLAUSES, 2))


def allowed_pair(name: str, head: int, query: int, key: int) -> bool:
    """True if a clause lets a token attend to a token, both counted from the first of the text."""
    segments = SEGMENTS[0].tolist()
    offsets = list(pairwise(OFFSETS.tolist()))
    return {
        "causal": key <= query,
        "window": query - 3 <= key <= query,
        "window of later keys": query - 6 <= key <= query + 2,
        "prefix": key < 2 or key <= query,
        "where": (key + head) % 3 != 0 and key <= query,
        "keys": key % 4 != 2,
        "pairs": (query + 2 * key) % 5 != 1,
        "segments": segments[query] == segments[key] >= 0,
        "packed": any(a <= query < b and a <= key < b for a, b in offsets),
    }[name]


def expected_pairs(names: tuple[str, ...], stops: list[int]) -> Tensor:
    """(heads, queries, keys): allowed by every clause, and in the cache when the query came."""
    in_call = [next(stop for stop in stops if query < stop) for query in range(LENGTH)]
    return torch.tensor(
        [
            [
                [
                    key < in_call[query] and all(allowed_pair(n, head, query, key) for n in names)
                    for key in range(LENGTH)
                ]
                for query in range(LENGTH)
            ]
            for head in range(HEADS)
        ]
    )


@pytest.fixture(scope="module")
def layer() -> Attention:
    torch.manual_seed(3)
    return Attention(EMBED, HEADS, head_dim=10, num_kv_heads=2).requires_grad_(False)


def both(names: tuple[str, ...], first: int, stop: int) -> Mask:
    mask = Mask()
    for name in names:
        mask = mask & CLAUSES[name](first, stop)
    return mask


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("names", PAIRS, ids=" and ".join)
def test_a_mask_hides_the_same_keys_in_every_schedule(
    layer: Attention, names: tuple[str, ...], schedule: tuple[int, ...]
) -> None:
    x = torch.randn(1, LENGTH, EMBED)
    stops = list(accumulate(schedule))
    cache = layer.cache(batch=1, length=LENGTH)
    found = torch.cat(
        [
            layer(x[:, first:stop], mask=both(names, first, stop), cache=cache)
            for first, stop in pairwise([0, *stops])
        ],
        dim=1,
    )
    whole = Mask.may_attend(expected_pairs(names, stops), axes="heads queries keys")

    def without_cache(x: Tensor) -> Tensor:
        return copy.deepcopy(layer).to(x.dtype)(x, mask=whole)

    Budget.for_function(without_cache, x).assert_holds(found)


@pytest.mark.parametrize("name", [name for name in CLAUSES if name not in RELATIVE])
def test_lengths_in_a_cache_go_with_clauses_by_distance_alone(layer: Attention, name: str) -> None:
    """The cache moves a shorter sequence, so the numbers of a token and of its slot part."""
    x, short = torch.randn(1, 9, EMBED), torch.tensor([2])
    lengths = Mask.lengths(queries=short, keys=short)
    cache = layer.cache(batch=1, length=9)
    with pytest.raises(HeadwiseError, match="clauses by distance only"):
        layer(x[:, :5], mask=lengths & CLAUSES[name](0, 5), cache=cache)
    layer(x[:, :5], mask=lengths & Mask.causal(), cache=cache)
    if name in ("prefix", "where"):
        with pytest.raises(HeadwiseError, match="lengths have moved sequences"):
            layer(x[:, 5:], mask=CLAUSES[name](5, 9), cache=cache)
        assert cache.seen == 5


def test_offsets_of_a_call_are_not_those_of_all_keys(layer: Attention) -> None:
    x, cache = torch.randn(1, 6, EMBED), layer.cache(batch=1, length=6)
    layer(x[:, :4], mask=Mask.packed(torch.tensor([0, 4])), cache=cache)
    new = torch.tensor([0, 2])
    for mask in (Mask.packed(new), Mask.packed(new).to("cpu") & Mask.causal()):
        with pytest.raises(HeadwiseError, match=r"offsets of the 2 new tokens .* all 6 keys"):
            layer(x[:, 4:], mask=mask, cache=cache)
    assert cache.seen == 4


@pytest.mark.parametrize("name", ["keys", "segments", "packed"])
def test_a_mask_that_hid_a_key_from_all_is_needed_in_every_call(
    layer: Attention, name: str
) -> None:
    x, cache = torch.randn(1, LENGTH, EMBED), layer.cache(batch=1, length=LENGTH + 1)
    layer(x, mask=CLAUSES[name](0, LENGTH), cache=cache)
    with pytest.raises(HeadwiseError, match="all 14 keys"):
        layer(x[:, :1], mask=Mask.causal(), cache=cache)
