"""Head statistics where the answer is known: even weights, one key, equal and opposite heads.

Everything is float64, and as near as `tests.scanning.statistics.calls.assert_is` allows.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.masks.mask import Mask
from headwise.matrix.operator import AttentionMatrix
from headwise.scanning.call import CapturedCall
from headwise.scanning.statistics.catalogue import find_standard_statistics
from headwise.scanning.statistics.maps import Map, block_size, block_sizes, coarsen_map
from headwise.scanning.statistics.statistic import compute_summaries
from tests.honest import normal
from tests.scanning.statistics.calls import assert_is, roundoff

LENGTH = 128
CERTAIN = 1000.0  # a score above the others by so much leaves them no weight


def read(name: str, matrix: AttentionMatrix, **known: Any) -> Tensor:
    observation = CapturedCall.for_self_attention(matrix, **known)
    (statistic,) = find_standard_statistics([name])
    return statistic.result(compute_summaries(observation, [statistic])[name])


def even(*, heads: int = 2, length: int = LENGTH, **options: Any) -> AttentionMatrix:
    """All scores are 0."""
    zeros = torch.zeros(1, heads, length, 3, dtype=torch.float64)
    return AttentionMatrix(zeros, zeros, **options)


def looking_at(places: Tensor) -> AttentionMatrix:
    """(heads, queries) places: each query looks at one key alone."""
    heads, length = places.shape
    q = torch.zeros(1, heads, length, length, dtype=torch.float64)
    q[0].scatter_(2, places[..., None], CERTAIN)
    k = torch.eye(length, dtype=torch.float64).expand(1, heads, -1, -1)
    return AttentionMatrix(q, k, scale=1.0)


def so_far_back(*steps: int, length: int = LENGTH) -> AttentionMatrix:
    """Head h looks ``steps[h]`` tokens back, and at key 0 where there is none."""
    return looking_at(torch.stack([(torch.arange(length) - step).clamp(min=0) for step in steps]))


I = torch.arange(LENGTH, dtype=torch.float64)  # noqa: E741 (the formulas' own letter)
EVEN_AND_CAUSAL = {
    "entropy": (I + 1).log().mean(),
    "relative_entropy": 1.0,
    "maximum": (1 / (I + 1)).mean(),
    "effective_keys": (I + 1).mean(),
    "participation": (I + 1).mean(),
    "logsumexp": (I + 1).log().mean(),
    "score_range": 0.0,
    "first_token": (1 / (I + 1)).mean(),
    "one_key": (1 / (I + 1)).mean(),
    "previous_token": (1 / (I[1:] + 1)).mean(),
    "distance": (I / 2).mean(),
    "within_16": ((I + 1).clamp(max=17) / (I + 1)).mean(),
    "within_64": ((I + 1).clamp(max=65) / (I + 1)).mean(),
    "within_256": 1.0,
    "total_variation": 1.0,
    "head_distance": 0.0,
}


@pytest.mark.parametrize("name", EVEN_AND_CAUSAL)
def test_even_weights_on_all_that_came_before(name: str) -> None:
    assert_is(read(name, even(mask=Mask.causal())), EVEN_AND_CAUSAL[name])


def test_the_offset_profile_of_even_weights() -> None:
    found = read("offset_profile", even(mask=Mask.causal()))
    before = [(1 / (I[back:] + 1)).mean() for back in range(16, -1, -1)]
    assert_is(found, torch.stack([*before, *[torch.tensor(0.0).double()] * 16]))


@pytest.mark.parametrize("name", ["most_received", "top_keys"])
def test_keys_are_counted_with_those_that_a_cache_dropped(name: str) -> None:
    places = torch.arange(LENGTH).flip(0).expand(2, -1)
    held, dropped = (read(name, looking_at(places), dropped=n) for n in (0, 5))
    assert_is(dropped[..., 0], held[..., 0] + 5)


def test_what_keys_receive_of_even_weights() -> None:
    found = read("most_received", even(mask=Mask.causal()))
    assert_is(found[..., 0], torch.arange(8))
    assert_is(found[..., 1], -1.0)  # no tokens are known
    assert_is(found[..., 2], torch.stack([(1 / (I[k:] + 1)).sum() for k in range(8)]))


def test_the_last_key_does_not_win_by_the_one_query_that_sees_it() -> None:
    # Each query gives half to the first key and half to its own, the first query all to itself.
    halves = torch.full((LENGTH, LENGTH), -CERTAIN, dtype=torch.float64).fill_diagonal_(0.0)
    halves[:, 0] = 0.0
    q = torch.eye(LENGTH, dtype=torch.float64)[None, None]
    matrix = AttentionMatrix(q, halves.mT[None, None], mask=Mask.causal(), scale=1.0)
    found = read("most_received", matrix)[0]
    assert_is(found[:, 0], torch.arange(8))  # of equal ones the earlier is first
    assert_is(found[:, 2], torch.tensor([(LENGTH + 1) / 2, *[0.5] * 7], dtype=torch.float64))


def test_a_key_of_a_short_sequence_does_not_win_by_its_few_queries() -> None:
    (one,) = find_standard_statistics(["most_received"])
    short, long = (
        compute_summaries(CapturedCall.for_self_attention(m), [one])["most_received"]
        for m in (even(mask=Mask.causal(), length=2), even(mask=Mask.causal()))
    )
    for order in ([short, long], [long, short]):
        assert torch.equal(one.result(one.merge(order)), one.result(long))


def assert_is_in_float32(found: Tensor, expected: Tensor) -> None:
    """Each is a sum that was rounded once, over an exact number of queries."""
    torch.testing.assert_close(found, expected.expand_as(found), rtol=2**-24, atol=0.0)


def test_the_map_of_even_weights() -> None:
    causal = even(mask=Mask.causal())
    single = (torch.ones(LENGTH, LENGTH).double() / (I + 1)[:, None]).tril()
    assert_is_in_float32(read("map", causal), single)
    found = Map(64).result(
        compute_summaries(CapturedCall.for_self_attention(causal), [Map(64)])["map"]
    )
    # Queries 2a and 2a + 1; each cell before the last has two keys of each.
    first, second = 1 / (2 * I[:64] + 1), 1 / (2 * I[:64] + 2)
    below = torch.ones(64, 64).double().tril(-1) * (first + second)[:, None]
    assert_is_in_float32(found, below + torch.diag((first + 2 * second) / 2))


def test_a_sink_that_takes_as_much_as_all_keys() -> None:
    matrix = even(sink=torch.full((2,), math.log(LENGTH), dtype=torch.float64))
    assert_is(read("sink", matrix), 0.5)
    assert_is(read("entropy", matrix), math.log(2) + math.log(LENGTH) / 2)
    assert_is(read("participation", matrix), LENGTH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sink", [17.0, 20.0, 40.0, 60.0, 80.0])
def test_participation_beside_a_sink_of_any_size(sink: float, dtype: torch.dtype) -> None:
    zeros = torch.zeros(1, 2, LENGTH, 3, dtype=dtype)
    matrix = AttentionMatrix(zeros, zeros, sink=torch.full((2,), sink, dtype=dtype))
    found = read("participation", matrix)  # the weights are even, however small
    assert (found - LENGTH).abs().amax() <= roundoff(LENGTH, dtype) * LENGTH


def test_participation_where_a_sink_takes_everything() -> None:
    assert_is(read("participation", even(sink=torch.full((2,), CERTAIN).double())), 0.0)


def test_the_score_range_of_a_ramp() -> None:
    k = I.view(1, 1, LENGTH, 1)
    ramp = AttentionMatrix(torch.ones_like(k), k, mask=Mask.causal(), scale=1.0)
    assert_is(read("score_range", ramp), I[1:].mean())  # the first query has no choice


def test_one_step_back() -> None:
    matrix = so_far_back(1, 0, 3)
    assert_is(
        read("previous_token", matrix),
        torch.tensor([1.0, 0.0, 1 / (LENGTH - 1)], dtype=torch.float64),
    )
    assert_is(
        read("distance", matrix), torch.tensor([LENGTH - 1, 0, 3 * LENGTH - 6]).double() / LENGTH
    )
    assert_is(read("entropy", matrix), 0.0)
    assert_is(read("maximum", matrix), 1.0)


# ---- tokens ------------------------------------------------------------------------------------


def test_a_sequence_that_comes_twice() -> None:
    half = LENGTH // 2
    matrix = so_far_back(half, half - 1, 1)
    known = {"tokens": torch.arange(half).repeat(2)[None]}
    assert_is(read("duplicate_token", matrix, **known), torch.tensor([1.0, 0.0, 0.0]))
    assert_is(read("induction", matrix, **known), torch.tensor([0.0, 1.0, 0.0]))


def test_without_any_repeat_there_is_no_value() -> None:
    matrix = so_far_back(1, 2)
    known = {"tokens": torch.arange(LENGTH)[None]}
    assert_is(read("duplicate_token", matrix, **known), torch.nan)
    assert_is(read("induction", matrix, **known), torch.nan)


def test_the_same_token_everywhere() -> None:
    matrix = even(mask=Mask.causal())
    known = {"tokens": torch.zeros(1, LENGTH, dtype=torch.long)}
    assert_is(read("duplicate_token", matrix, **known), (I[1:] / (I[1:] + 1)).mean())
    assert_is(read("induction", matrix, **known), (I[1:] / (I[1:] + 1)).mean())


def test_separators_and_special_tokens() -> None:
    matrix = even()
    third = (torch.arange(LENGTH) % 4 == 3)[None]
    known = {"separators": third, "specials": ~third}
    assert_is(read("separator", matrix, **known), 0.25)
    assert_is(read("special", matrix, **known), 0.75)


def test_copying_what_is_looked_at() -> None:
    length = 16
    places = torch.arange(length).flip(0).expand(3, -1)
    matrix = looking_at(places)
    one_hot = torch.eye(length, dtype=torch.float64)[places[0]]
    outputs = torch.stack([one_hot, -one_hot, 0 * one_hot])[None]
    eye = torch.eye(length, dtype=torch.float64)
    more = {"outputs": outputs, "out_proj": 2 * eye.expand(3, -1, -1), "unembedding": eye}
    known = {"tokens": torch.arange(length)[None]}
    # Weights on other keys are 0, so that no query sees two tokens: no head has a value.
    assert_is(read("copying", matrix, **known, **more), torch.nan)
    even_ones = even(heads=3, length=length)
    found = read("copying", even_ones, **known, **more)
    # Even weight on 16 tokens, one of which is raised; or on 15 raised ones of 16.
    assert_is(found, torch.tensor([1 / 16, 1 / 16, torch.nan]))


def test_copying_against_writing_something_else() -> None:
    # Two keys: weight p on key 0 and 1 - p on key 1.
    p = 0.9
    k = torch.tensor([math.log(p), math.log(1 - p)], dtype=torch.float64).view(1, 1, 2, 1)
    matrix = AttentionMatrix(torch.ones(1, 2, 2, 1).double(), k.expand(1, 2, 2, 1), scale=1.0)
    eye = torch.eye(2, dtype=torch.float64)
    outputs = torch.stack([eye[[0, 0]], eye[[1, 1]]])[None]  # head 0 writes token 0, head 1 token 1
    known = {"tokens": torch.tensor([[0, 1]])}
    more = {"outputs": outputs, "out_proj": eye.expand(2, -1, -1), "unembedding": eye + 5}
    found = read("copying", matrix, **known, **more)
    assert_is(found, torch.tensor([p, 1 - p], dtype=torch.float64))


@pytest.mark.parametrize("strange", [-1, 2, 50])
def test_copying_knows_nothing_of_tokens_without_a_row(strange: int) -> None:
    # Three keys with weights 0.5, 0.2 and 0.3; what the third holds has no row.
    shares = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    k = shares.log().view(1, 1, 3, 1).expand(1, 2, 3, 1)
    matrix = AttentionMatrix(torch.ones(1, 2, 3, 1).double(), k, scale=1.0)
    eye = torch.eye(2, dtype=torch.float64)
    outputs = torch.stack([eye[[0, 0, 0]], eye[[1, 1, 1]]])[None]
    known = {"tokens": torch.tensor([[0, 1, strange]])}
    more = {"outputs": outputs, "out_proj": eye.expand(2, -1, -1), "unembedding": eye}
    assert_is(read("copying", matrix, **known, **more), shares[:2])


# ---- outputs and pairs of heads ----------------------------------------------------------------


def test_norms_of_what_is_written() -> None:
    matrix = even()
    outputs = torch.tensor([3.0, 4.0]).double().expand(1, 2, LENGTH, 2)
    turn = torch.tensor([[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0]]).double()  # an isometry
    more = {"outputs": outputs, "out_proj": torch.stack([turn, 2 * turn])}
    assert_is(read("contribution_norm", matrix, **more), torch.tensor([5.0, 10.0]))
    residual = torch.tensor([0.0, 0.0, 2.0]).double().expand(1, LENGTH, 3)
    found = read("relative_contribution", matrix, residual=residual, **more)
    assert_is(found, torch.tensor([2.5, 5.0]))
    # One key in four has a value, of norm 13.
    values = torch.zeros(1, 1, LENGTH, 2, dtype=torch.float64)
    values[0, 0, ::4] = torch.tensor([5.0, 12.0]).double()
    found = read("value_weighted", matrix, values=values, out_proj=more["out_proj"])
    assert_is(found, torch.tensor([13 / 4, 26 / 4]))


def test_as_many_directions_as_there_are() -> None:
    axes = torch.eye(4, dtype=torch.float64)
    signs = torch.tensor([1.0, -1.0]).double()[:, None, None]
    both = (signs * axes).flatten(0, 1)  # ± each axis: mean 0, equal spread
    four = both.repeat(LENGTH // 8, 1) + 7
    two = torch.where(torch.arange(4) < 2, four - 7, 0.0)
    none = torch.full_like(four, 3.7)
    found = read("effective_rank", even(heads=3), outputs=torch.stack([four, two, none])[None])
    assert_is(found, torch.tensor([4.0, 2.0, torch.nan]))


def test_equal_opposite_and_unrelated_outputs() -> None:
    z = normal(LENGTH, 4)
    across = torch.zeros_like(z)
    outputs = torch.stack(
        [torch.cat([x, y], 1) for x, y in ((z, 0 * z), (-2 * z, 0 * z), (across, z))]
    )
    eye = torch.eye(8, dtype=torch.float64).expand(3, -1, -1)
    cosine = read("output_cosine", even(heads=3), outputs=outputs[None], out_proj=eye)
    assert_is(cosine, torch.tensor([[1.0, -1, 0], [-1, 1, 0], [0, 0, 1]]))


def test_cka_sees_no_rotation_scale_or_shift() -> None:
    z = normal(LENGTH, 4)
    turned = 3 * z @ torch.linalg.qr(normal(4, 4, seed=1))[0] + 2
    found = read("cka", even(heads=2), outputs=torch.stack([z, turned])[None])
    assert_is(found, 1.0)


def test_cka_of_unrelated_outputs_is_about_0() -> None:
    heads = normal(40, 2, LENGTH, 4).unbind(0)
    found = torch.stack([read("cka", even(heads=2), outputs=x[None])[0, 1] for x in heads])
    # The mean of 40 unbiased estimates, within four of its standard deviations.
    assert found.mean().abs() < 4 * found.std() / math.sqrt(40)


def test_heads_that_look_elsewhere() -> None:
    found = read("total_variation", so_far_back(0, 1))
    rows = 64  # the samples are the odd queries: the first query, alike for both, is not one
    assert_is(found, torch.tensor([[1.0, 0.0], [0.0, 1.0]]), terms=rows)


# ---- maps of any size --------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32, 64, 128])
def test_a_map_in_larger_blocks_is_exact(size: int) -> None:
    matrix = even(mask=Mask.causal())
    fine = compute_summaries(CapturedCall.for_self_attention(matrix), [Map()])["map"]
    coarse = coarsen_map(fine, [size, size])
    assert block_sizes(coarse) == (size, size)
    # Of size² terms that were rounded, and as many sums of float32.
    expected, terms = matrix.pool(LENGTH // size, LENGTH // size)[0], size * size
    torch.testing.assert_close(Map().result(coarse), expected, rtol=(terms + 1) * 2**-24, atol=0.0)


@pytest.mark.parametrize(
    ("length", "cells", "blocks", "size"),
    [
        *((n, 0, n, 1) for n in (1, 129, 200, 511, 512)),
        (513, 0, 129, 4),
        (640, 0, 160, 4),
        (641, 0, 81, 8),
        (1000, 0, 125, 8),
        (16_384, 0, 128, 128),
        (1000, 256, 250, 4),
        (100, 7, 7, 16),
        (100, 1, 1, 128),
    ],
)
def test_blocks_of_a_text(length: int, cells: int, blocks: int, size: int) -> None:
    assert block_size(length, cells) == size
    assert -(-length // size) == blocks
    assert block_size(length, blocks) == size  # a reader of a map needs nothing else


@pytest.mark.slow
def test_a_map_of_16_384_tokens_has_equal_blocks() -> None:
    """Each query looks one token back, so the weight between two blocks is known."""
    length, width = 16_384, 16
    angle = torch.arange(length).double() / length * math.tau
    waves = torch.arange(1, width + 1).double()[:, None] * angle
    k = torch.cat([waves.cos(), waves.sin()]).T[None, None].float()
    q = k.roll(1, dims=2)
    q[0, 0, 0] = k[0, 0, 0]
    # The next key has a score that is less by the scale times 1 - cos, over all waves.
    matrix = AttentionMatrix(q, k, scale=2e7)
    found = read("map", matrix)[0]
    assert found.shape == (128, 128)
    expected = torch.eye(128).double()
    expected = expected * 127 / 128 + expected.roll(1, 0).tril() / 128
    expected[0, 0] = 1.0
    assert (found - expected).abs().max() < 1e-6
