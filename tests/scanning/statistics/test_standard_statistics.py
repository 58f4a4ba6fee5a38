"""The standard head statistics against the dense weights, for every kind of mask.

How far they may be off is not chosen but derived (docs/budget.md; u and growth as there).

    allowed = 2 * (largest error of the dense reference run in the dtype of the inputs)
            + (how far the exact result moves when all inputs move by one unit in the last place)
            + u * (2 growth(n) + 2 f + 2) * size

The first two are `Budget.for_function`: what the errors of the scores, and of the outputs, do to
the result. The third is the rounding after them. The weights of a row of n outcomes are off by
u (2 f + 1 + growth(n)), relatively: two exp of error f u, the sum Z, a division
(`RowRounding.relative_weight_error`). A statistic of a row is a sum of at most n of them, that
is growth(n) u more, and the mean over rows, in float64, one rounding. It is relative to the size of
what was summed: that of the result where terms are never negative, and at least 1 for the rest (a
logarithm of Z, differences of scores or shares, cosines).

Inputs of half types are widened first: the statistics must compute in float32 and get no more.

Tiles are made so small that a row block has several, and that heads fall apart.
"""

from functools import lru_cache

import pytest
import torch
from torch import Tensor

from headwise.function.budget import Budget
from headwise.function.rounding import FORWARD, measure_family
from headwise.matrix.kernels import tiles
from headwise.matrix.kernels.kernel import accumulation_dtype
from headwise.scanning import call as captured_call
from headwise.scanning.statistics.catalogue import STANDARD
from headwise.scanning.statistics.statistic import Summary, compute_summaries
from tests.quick import others_slow
from tests.scanning.statistics.calls import KINDS, Call, Kind, roundoff
from tests.scanning.statistics.dense_statistics import REFERENCE

BY_NAME = {statistic.definition.name: statistic for statistic in STANDARD}
SMALL = 3 * 5 * 29  # elements: five rows of the three heads of one kv head
CAN_CANCEL = (
    "logsumexp",
    "score_range",
    "copying",
    "output_cosine",
    "cka",
    "total_variation",
    "head_distance",
    "effective_rank",
)
FIELDS = ("most_received", "top_keys")  # exact keys and tokens beside the share


@lru_cache
def drawn(kind: str) -> Call:
    return KINDS[kind].call()


@lru_cache
def summaries(kind: str, elements: int) -> dict[str, Summary]:
    """Of every statistic that the call can have, in one sweep."""
    call = drawn(kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE_ELEMENTS", elements)
        patch.setattr(captured_call, "SAMPLES", call.samples)
        observation = call.observation()
        chosen = [s for s in STANDARD if s.reason_not_computable(observation) is None]
        return compute_summaries(observation, chosen)


def assert_as_dense(call: Call, found: dict[str, Tensor]) -> None:
    """Each within the budget of the dense reference; NaN where, and only where, it is NaN."""
    wide = accumulation_dtype(call.inputs[0].dtype)

    def reference(*inputs: Tensor) -> list[Tensor]:
        seen = call.seen(*inputs)
        return [REFERENCE[name](seen) for name in found]

    def numbers(*inputs: Tensor) -> tuple[Tensor, ...]:
        results = zip(found, reference(*inputs), strict=True)
        return tuple(number_of(name, result) for name, result in results)

    # Budget.for_function for all statistics of one call, which share what is written down.
    family = zip(*measure_family(numbers, [x.to(wide) for x in call.inputs]), strict=True)
    exact_results = reference(*(x.double() for x in call.inputs))
    for (name, own), whole, (exact, plain, moved) in zip(
        found.items(), exact_results, family, strict=True
    ):
        assert own.dtype == torch.float64
        assert torch.equal(own.isnan(), whole.isnan()), name
        if name in FIELDS:
            assert torch.equal(own[..., :2].nan_to_num(), whole[..., :2].nan_to_num())
        size = exact.abs().clamp(min=1.0 if name in CAN_CANCEL else 0.0)
        rounding = roundoff(call.inputs[1].shape[2] + 1, wide) * size
        if name == "map":
            rounding = rounding + exact.abs() * 2**-24  # its sums are stored in float32
        budget = Budget(name, wide, exact, FORWARD * plain + moved + rounding)
        budget.assert_holds(number_of(name, own))


def number_of(name: str, result: Tensor) -> Tensor:
    return (result[..., 2] if name in FIELDS else result).nan_to_num(0.0)


@pytest.mark.parametrize(
    "kind",
    others_slow(
        KINDS,
        "causal",
        "left padding",
        "cached",
        "cross",
        "sink",
        "bfloat16",
        "alibi",
        "hidden rows",
    ),
)
def test_streamed_is_dense(kind: str) -> None:
    call, found = drawn(kind), summaries(kind, SMALL)
    observation = call.observation()
    known = {name for name in REFERENCE if BY_NAME[name].reason_not_computable(observation) is None}
    assert found.keys() == known
    assert_as_dense(call, {name: BY_NAME[name].result(found[name]) for name in found})


@pytest.mark.parametrize("kind", ["causal", "left padding", "segments"])
def test_whatever_the_tiles(kind: str) -> None:
    found = summaries(kind, 2**21)
    assert_as_dense(drawn(kind), {name: BY_NAME[name].result(found[name]) for name in found})


@pytest.mark.parametrize("kind", KINDS)
def test_summaries_have_one_row_a_head_and_stay_on_the_cpu(kind: str) -> None:
    for name, summary in summaries(kind, SMALL).items():
        parts = BY_NAME[name].parts or {}
        for part, value in summary.items():
            assert not parts[part].per_head or value.shape[0] == 6
            assert value.device.type == "cpu"
            is_map = (name, part) == ("map", "sum")  # the largest of all
            assert value.dtype in ((torch.float32,) if is_map else (torch.float64, torch.int64))
        result = BY_NAME[name].result(summary)
        assert result.dim() == 1 + len(BY_NAME[name].definition.axes)


def test_two_calls_merged_are_one() -> None:
    kind: Kind = KINDS["causal"]
    parts = [kind.call(batch=part).observation() for part in (slice(0, 1), slice(1, None))]
    chosen = [
        statistic for statistic in STANDARD if statistic.reason_not_computable(parts[0]) is None
    ]
    first, second = (compute_summaries(part, chosen) for part in parts)
    merged = {name: BY_NAME[name].merge([first[name], second[name]]) for name in first}
    assert_as_dense(kind.call(), {name: BY_NAME[name].result(merged[name]) for name in merged})


@pytest.mark.parametrize("name", [name for name in REFERENCE if name != "top_keys"])
def test_the_order_of_merging_is_no_matter(name: str) -> None:
    statistic = BY_NAME[name]
    a, b = (summaries(kind, SMALL).get(name) for kind in ("sink", "everything"))
    assert a is not None
    assert b is not None
    before = {key: value.clone() for key, value in a.items()}
    there, back = statistic.merge([a, b]), statistic.merge([b, a])
    nested = statistic.merge([statistic.merge([a, b]), a])
    flat = statistic.merge([a, b, a])
    for key in a:
        assert torch.equal(there[key], back[key])
        assert torch.equal(nested[key], flat[key])
        assert torch.equal(a[key], before[key])  # nothing is changed in place
