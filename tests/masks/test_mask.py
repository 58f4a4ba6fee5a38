"""Masks: every clause against a loop over its definition, conventions against torch itself."""

import copy
import itertools
import pickle
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from headwise import AttentionMatrix
from headwise.masks.bound import BoundMask
from headwise.masks.clauses.dense import Dense
from headwise.masks.clauses.lengths import Lengths
from headwise.masks.mask import Mask
from tests.strategies import allowed, masks

CPU = torch.device("cpu")
SHAPE = (3, 6, 24, 29)
Predicate = Callable[[int, int, int, int], bool]


def bind(mask: Mask, shape: tuple[int, int, int, int] = SHAPE) -> BoundMask:
    batch, heads, queries, keys = shape
    return mask.bind(batch=batch, heads=heads, queries=queries, keys=keys, device=CPU)


def brute(predicate: Predicate, shape: tuple[int, int, int, int] = SHAPE) -> Tensor:
    """The definition, pair by pair."""
    rows = [predicate(*index) for index in itertools.product(*map(range, shape))]
    return torch.tensor(rows, dtype=torch.bool).reshape(shape)


def random_bool(*sizes: int, seed: int = 0) -> Tensor:
    return torch.rand(sizes, generator=torch.Generator().manual_seed(seed)) < 0.6


def random_ids(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randint(-1, 3, sizes, generator=torch.Generator().manual_seed(seed))


# ---- every clause against its definition -----------------------------------------------------

LENGTHS, SHORT_QUERIES = torch.tensor([29, 0, 11]), torch.tensor([7, 24, 0])
IDS, KEY_IDS = random_ids(3, 24), random_ids(3, 29, seed=1)
PADDING, PAIRS = random_bool(3, 29), random_bool(24, 29)
HEADS, WHOLE = random_bool(6), random_bool(3, 6, 24, 29)
PER_HEAD = random_bool(6, 24, 29)
OFFSET = 29 - 24  # the last query stands at the last key

CLAUSES: dict[str, tuple[Mask, Predicate]] = {
    "everything": (Mask(), lambda b, h, i, j: True),
    "causal top-left": (Mask.causal(align="top-left"), lambda b, h, i, j: j <= i),
    "causal bottom-right": (Mask.causal(align="bottom-right"), lambda b, h, i, j: j <= i + OFFSET),
    "window top-left": (
        Mask.window(3, 2, align="top-left"),
        lambda b, h, i, j: i - 3 <= j <= i + 2,
    ),
    "window bottom-right": (
        Mask.window(0, 4, align="bottom-right"),
        lambda b, h, i, j: i + OFFSET <= j <= i + OFFSET + 4,
    ),
    "window open to the right": (
        Mask.window(2, None, align="top-left"),
        lambda b, h, i, j: i - 2 <= j,
    ),
    "window open on both sides": (
        Mask.window(None, None, align="top-left"),
        lambda b, h, i, j: True,
    ),
    "key lengths": (Mask.lengths(keys=LENGTHS), lambda b, h, i, j: j < LENGTHS[b]),
    "query lengths": (
        Mask.lengths(queries=SHORT_QUERIES),
        lambda b, h, i, j: i < SHORT_QUERIES[b],
    ),
    "key lengths, left-padded": (
        Mask.lengths(keys=LENGTHS, side="left"),
        lambda b, h, i, j: j >= 29 - LENGTHS[b],
    ),
    "query lengths, left-padded": (
        Mask.lengths(queries=SHORT_QUERIES, side="left"),
        lambda b, h, i, j: i >= 24 - SHORT_QUERIES[b],
    ),
    "starts": (
        Mask.starts(keys=LENGTHS, queries=SHORT_QUERIES),
        lambda b, h, i, j: bool(j >= LENGTHS[b] and i >= SHORT_QUERIES[b]),
    ),
    "prefix": (Mask.prefix(5, align="top-left"), lambda b, h, i, j: j < 5 or j <= i),
    "prefix of each sequence": (
        Mask.prefix(LENGTHS, align="bottom-right"),
        lambda b, h, i, j: bool(j < LENGTHS[b] or j <= i + OFFSET),
    ),
    "where": (
        Mask.where(lambda batch, head, query, key: (batch + 2 * head + 3 * query + key) % 5 < 3),
        lambda b, h, i, j: (b + 2 * h + 3 * i + j) % 5 < 3,
    ),
    "where of one axis": (Mask.where(lambda b, h, i, j: h != 2), lambda b, h, i, j: h != 2),
    "segments": (
        Mask.segments(IDS, KEY_IDS),
        lambda b, h, i, j: bool(IDS[b, i] == KEY_IDS[b, j] >= 0),
    ),
    "batch keys": (Mask.may_attend(PADDING, axes="batch keys"), lambda b, h, i, j: PADDING[b, j]),
    "queries keys": (Mask.may_attend(PAIRS, axes="queries keys"), lambda b, h, i, j: PAIRS[i, j]),
    "heads": (Mask.may_attend(HEADS, axes="heads"), lambda b, h, i, j: HEADS[h]),
    "heads queries keys": (
        Mask.may_attend(PER_HEAD, axes="heads queries keys"),
        lambda b, h, i, j: PER_HEAD[h, i, j],
    ),
    "all four axes": (
        Mask.may_attend(WHOLE, axes="batch heads queries keys"),
        lambda b, h, i, j: WHOLE[b, h, i, j],
    ),
}


@pytest.mark.parametrize("shape", [(6, 2, 0), (6, 0, 5), (0, 2, 5)])
def test_from_torch_without_elements(shape: tuple[int, int, int]) -> None:
    (clause,) = Mask.from_torch(torch.zeros(shape, dtype=torch.bool), num_heads=3).clauses_of_kind(
        Dense
    )
    assert clause.allowed.shape == (shape[0] // 3, 3, *shape[1:])


@pytest.mark.parametrize("name", CLAUSES)
def test_a_clause_is_its_definition(name: str) -> None:
    mask, predicate = CLAUSES[name]
    assert torch.equal(allowed(mask, SHAPE), brute(predicate))


@pytest.mark.parametrize("seed", range(30))
def test_a_conjunction_allows_what_all_its_clauses_allow(seed: int) -> None:
    chosen = random.Random(seed).choices([*CLAUSES.values()], k=3)
    mask = chosen[0][0] & chosen[1][0] & chosen[2][0]
    expected = torch.stack([allowed(m, SHAPE) for m, _ in chosen]).all(0)
    assert torch.equal(allowed(mask, SHAPE), expected)


@pytest.mark.parametrize(("queries", "keys"), [(2, 5), (5, 2), (4, 4), (1, 7), (7, 1)])
@pytest.mark.parametrize("align", ["top-left", "bottom-right"])
@pytest.mark.parametrize("left", [None, 0, 1, 9])
@pytest.mark.parametrize("right", [None, 0, 2, 9])
def test_a_window_is_its_definition_at_every_shape(
    queries: int, keys: int, align: Any, left: int | None, right: int | None
) -> None:
    offset = 0 if align == "top-left" else keys - queries

    def predicate(b: int, h: int, i: int, j: int) -> bool:
        own = i + offset
        return (left is None or j >= own - left) and (right is None or j <= own + right)

    shape = (1, 1, queries, keys)
    mask = Mask.window(left, right, align=align)
    assert torch.equal(allowed(mask, shape), brute(predicate, shape))
    bound, expected = bind(mask, shape), brute(predicate, shape)[0, 0]
    assert bool(bound.hiding_clauses) == (not expected.all())


# ---- blocks ----------------------------------------------------------------------------------


@st.composite
def tiles(draw: st.DrawFn) -> tuple[Mask, tuple[int, int, int, int], list[slice]]:
    shape = tuple(draw(st.integers(1, most)) for most in (3, 4, 17, 19))
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    mask = masks(lambda options: draw(st.sampled_from(options)), shape, generator)
    parts = []
    for size in shape:
        first = draw(st.integers(0, size - 1))
        parts.append(slice(first, draw(st.integers(first + 1, size))))
    return mask or Mask(), shape, parts


@given(tiles())
def test_a_block_is_a_tile_of_the_mask(
    drawn: tuple[Mask, tuple[int, int, int, int], list[slice]],
) -> None:
    mask, shape, (batches, heads, rows, columns) = drawn
    bound, whole = bind(mask, shape), allowed(mask, shape)
    expected = whole[batches, heads, rows, columns]
    i = torch.arange(shape[2])[rows]
    for index in (rows, i):  # rows as a slice, and as a list of positions
        block = bound.evaluate_block(batches, heads, index, columns)
        got = torch.tensor(True) if block is None else block
        assert torch.equal(got.expand(expected.shape), expected)
    flipped = i.flip(0)
    assert torch.equal(
        bound.evaluate_rows(flipped).expand(*shape[:2], -1, -1), whole[:, :, flipped]
    )


@given(tiles())
def test_pairs_are_elements_of_the_mask(
    drawn: tuple[Mask, tuple[int, int, int, int], list[slice]],
) -> None:
    mask, shape, _ = drawn
    i, j = torch.arange(shape[2] * shape[3]) // shape[3], torch.arange(shape[2] * shape[3])
    j = j % shape[3]
    got = bind(mask, shape).evaluate_pairs(i, j).expand(*shape[:2], -1)
    assert torch.equal(got, allowed(mask, shape).flatten(2))


@pytest.mark.parametrize("seed", range(40))
def test_key_range_and_open_range_agree_with_the_mask(seed: int) -> None:
    choose = random.Random(seed).choice
    queries, keys = choose(range(1, 12)), choose(range(1, 12))
    sides = (None, 0, 1, 3, 20)
    mask = Mask.window(choose(sides), choose(sides), align=choose(("top-left", "bottom-right")))
    mask = mask & Mask.window(choose(sides), choose(sides), align="top-left")
    bound = bind(mask, (1, 1, queries, keys))
    whole = allowed(mask, (1, 1, queries, keys))[0, 0]
    for first in range(queries):
        for stop in range(first + 1, queries + 1):
            tile = whole[first:stop]
            start, end = bound.key_range(first, stop)
            assert 0 <= start <= end <= keys
            assert not tile[:, :start].any()
            assert not tile[:, end:].any()
            left, right = bound.fully_allowed_key_range(first, stop)
            inside = torch.tensor([left <= key < right for key in range(keys)])
            assert torch.equal(inside, tile.all(0))


def test_bands_are_merged_and_nothing_needs_no_block() -> None:
    bound = bind(Mask.causal(align="top-left") & Mask.window(4, None, align="bottom-right"))
    assert bound.clauses == (bound.band,)
    assert bound.band is not None
    assert bound.band.sides == (4 - OFFSET, 0)
    assert bind(Mask()).evaluate_block(slice(None), slice(None), slice(None), slice(None)) is None


# ---- the conventions of torch ----------------------------------------------------------------


def torch_weights(length: int = 5, **masked: Any) -> Tensor:
    """What nn.MultiheadAttention attends to: (batch 3, heads 2, queries, keys)."""
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(3, length, 8)
    return layer(x, x, x, average_attn_weights=False, **masked)[1].detach()


def one_key_for_all(blocked: Tensor) -> Tensor:
    """Key 0 is free for all: torch's layer gives NaN for a row without keys."""
    return blocked.index_fill(-1, torch.tensor([0]), value=False)


@pytest.mark.parametrize("sizes", [(5, 5), (6, 5, 5)])
@pytest.mark.parametrize("form", ["bool", "float"])
def test_from_torch_reads_an_attn_mask_as_torchs_layer_does(
    sizes: tuple[int, ...], form: str
) -> None:
    blocked = one_key_for_all(random_bool(*sizes))
    given_mask = blocked
    if form == "float":
        given_mask = torch.zeros(sizes).masked_fill(blocked, -torch.inf)
    seen = torch_weights(attn_mask=given_mask) > 0
    mask = Mask.from_torch(given_mask, num_heads=2 if len(sizes) == 3 else None)
    assert torch.equal(allowed(mask, (3, 2, 5, 5)), seen)


@pytest.mark.parametrize("form", ["bool", "float"])
def test_from_torch_padding_reads_a_key_padding_mask_as_torchs_layer_does(form: str) -> None:
    ignored = one_key_for_all(random_bool(3, 5))
    given_mask = ignored
    if form == "float":
        given_mask = torch.zeros(3, 5).masked_fill(ignored, -torch.inf)
    seen = torch_weights(key_padding_mask=given_mask) > 0
    assert torch.equal(allowed(Mask.from_torch_padding(given_mask), (3, 2, 5, 5)), seen)


@pytest.mark.parametrize("sizes", [(4, 5), (3, 2, 4, 5), (3, 1, 1, 5), (1, 2, 4, 1)])
@pytest.mark.parametrize("form", ["bool", "float"])
def test_from_sdpa_reads_a_mask_as_torchs_function_does(sizes: tuple[int, ...], form: str) -> None:
    attends = random_bool(*sizes)
    given_mask = attends
    if form == "float":
        given_mask = torch.zeros(sizes).masked_fill(~attends, -torch.inf)
    q, k = torch.randn(3, 2, 4, 5), torch.randn(3, 2, 5, 5)
    identity = torch.eye(5).expand(3, 2, 5, 5)  # attends with the weights themselves
    seen = scaled_dot_product_attention(q, k, identity, attn_mask=given_mask) > 0
    assert torch.equal(allowed(Mask.from_sdpa(given_mask), (3, 2, 4, 5)), seen)


def test_the_two_conventions_are_each_others_negation() -> None:
    t = random_bool(4, 5)
    torch_reads, sdpa_reads = Mask.from_torch(t), Mask.from_sdpa(t)
    shape = (1, 1, 4, 5)
    assert torch.equal(allowed(torch_reads, shape), ~allowed(sdpa_reads, shape))


def test_sdpas_causal_is_top_left() -> None:
    q, k = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 5, 4)
    v = torch.eye(5)[None, None]
    seen = scaled_dot_product_attention(q, k, v, is_causal=True) > 0
    assert torch.equal(allowed(Mask.causal(align="top-left"), (1, 1, 2, 5)), seen)


# ---- drawing and values ----------------------------------------------------------------------


def test_draw_is_the_picture() -> None:
    assert Mask.causal(align="top-left").draw(2, 5) == "1 0 0 0 0\n1 1 0 0 0"
    assert Mask.causal(align="bottom-right").draw(2, 5) == "1 1 1 1 0\n1 1 1 1 1"
    assert Mask.causal(align="bottom-right").draw(3, 2) == "0 0\n1 0\n1 1"
    assert Mask.causal().draw(2) == "1 0\n1 1"


def test_draw_knows_the_sizes_of_its_tensors() -> None:
    packed = Mask.segments(torch.tensor([[0, 0, 1]]), torch.tensor([[0, 1, 1, -1]]))
    assert packed.draw() == "1 0 0 0\n1 0 0 0\n0 1 1 0"
    lengths = Mask.lengths(keys=torch.tensor([1, 3]))
    assert lengths.draw(1, 3, batch=1) == "1 1 1"
    assert lengths.draw(1, 3) == "1 0 0"
    heads = Mask.may_attend(torch.tensor([True, False]), axes="heads")
    assert (heads.draw(1, 2, head=0), heads.draw(1, 2, head=1)) == ("1 1", "0 0")


def test_str_names_the_clauses() -> None:
    mask = Mask.causal(align="bottom-right") & Mask.window(4, 0) & Mask.lengths(keys=LENGTHS)
    mask = mask & Mask.segments(IDS, KEY_IDS) & Mask.may_attend(PADDING, axes="batch keys")
    assert str(mask) == (
        "causal bottom-right & window(left=4, right=0) & lengths(keys) & segments "
        "& may_attend(3, 1, 1, 29)"
    )
    assert repr(Mask()) == "Mask(everything)"


def test_a_mask_can_be_copied_and_pickled() -> None:
    mask = Mask.causal(align="top-left") & Mask.lengths(keys=LENGTHS)
    for other in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask)), mask.to("cpu")):
        assert torch.equal(allowed(other, SHAPE), allowed(mask, SHAPE))


def test_two_lengths_mean_the_shorter() -> None:
    mask = Mask.lengths(keys=torch.tensor([3, 9])) & Mask.lengths(keys=torch.tensor([5, 2]))
    (merged,) = bind(mask, (2, 1, 4, 9)).clauses
    assert isinstance(merged, Lengths)
    assert merged.numbers.tolist() == [3, 2]


# ---- the edges of sizes --------------------------------------------------------------------------


@pytest.mark.parametrize("side", [sys.maxsize, 10**30])
def test_a_window_without_end_bounds_nothing(side: int) -> None:
    q, k = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 7, 4)
    for sides in ((None, side), (side, 0), (side, side)):
        expected = Mask.window(*(None if s == side else s for s in sides), align="bottom-right")
        found = Mask.window(*sides, align="bottom-right")
        one, other = AttentionMatrix(q, k, mask=found), AttentionMatrix(q, k, mask=expected)
        assert torch.equal(one.received(), other.received())
        assert torch.equal(one.dense(), other.dense())


def test_what_is_empty_is_drawn_empty() -> None:
    assert Mask.lengths(torch.tensor([], dtype=torch.int64)).draw(0) == ""
    assert Mask.causal().draw(0, 0) == ""
    assert Mask.may_attend(torch.ones(2, 0, dtype=torch.bool), axes="queries keys").draw() == "\n"
