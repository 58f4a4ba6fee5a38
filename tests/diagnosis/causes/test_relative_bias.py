"""Causes in a learned bias by distance, with faults that were made by loops over distances."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headwise.diagnosis.simulation.model import AttentionModel, ForcedStage
from headwise.function.spec import BucketRule
from tests.diagnosis.causes.faulty_models import (
    HEADS,
    TOKENS,
    inputs_of,
    model_of,
    recorded,
    searched,
)
from tests.quick import others_slow

BUCKETS, MAX_DISTANCE = 12, 15
RULE = BucketRule(BUCKETS, MAX_DISTANCE, bidirectional=True)
NAMES = (
    "relative bias buckets",
    "relative bias reversed",
    "relative bias reshaped",
    "distance bias coefficient",
    "scale",
)


def right_model() -> AttentionModel:
    generator = torch.Generator().manual_seed(9)
    table = torch.randn(BUCKETS, HEADS, generator=generator, dtype=torch.float64)
    return model_of(score_bias=RULE, rotary=None).with_weights(distances=table)


def bucket(distance: int, *, both: bool = True, exact: int = 3, most: int = MAX_DISTANCE) -> int:
    """Return the bucket of a key less a query by T5's formula, one number at a time."""
    side = BUCKETS // 2 if both else BUCKETS
    start = side if both and distance > 0 else 0
    far = abs(distance) if both else max(-distance, 0)
    if far < exact:
        return start + far
    steps = math.log(far / exact) / math.log(most / exact) * (side - exact)
    return start + min(exact + math.floor(steps + 1e-6), side - 1)


def biased(bias: Callable[[Tensor], Tensor]) -> Callable[[ForcedStage], Tensor]:
    """Return scores with a bias (heads, queries, keys) of the table."""

    def scores(forced: ForcedStage) -> Tensor:
        bare = forced.model.with_settings(score_bias=None)
        table = forced.model.weights["distances"]
        return replace(forced, model=bare).usual_result() + bias(table)

    return scores


def looked_up(buckets: Callable[[int], int]) -> Callable[[Tensor], Tensor]:
    def bias(table: Tensor) -> Tensor:
        rows = [[buckets(key - query) for key in range(TOKENS)] for query in range(TOKENS)]
        return table[torch.tensor(rows)].permute(2, 0, 1)

    return bias


def causes_of(bias: Callable[[Tensor], Tensor]) -> list[tuple[str, dict[str, object]]]:
    model = right_model()
    faulty = model.with_stage_function("scores", biased(bias))
    result = searched(model, recorded(faulty, inputs_of()), *NAMES)
    if result.causes:
        assert not result.left.cells_beyond_rounding
    return [(each.cause.name, dict(each.variant.parameters)) for each in result.causes]


def test_the_loop_is_the_formula() -> None:
    model = right_model()
    same = model.with_stage_function("scores", biased(looked_up(bucket)))
    assert not searched(model, recorded(same, inputs_of()), *NAMES).left.cells_beyond_rounding


@pytest.mark.parametrize(
    ("buckets", "parameters"),
    [
        (lambda d: bucket(d, both=False, exact=6), {"bidirectional": False}),
        (lambda d: bucket(d, most=128), {"max_distance": 128}),
        (lambda d: bucket(d, exact=5), {"max_exact": 5}),
        (
            lambda d: bucket(d, both=False, exact=6, most=128),
            {"bidirectional": False, "max_distance": 128},
        ),
        (lambda d: 4 * (d > 0) + min(abs(d), 2 + (abs(d) > 5)), {"buckets": 8}),
    ],
)
def test_other_buckets(buckets: Callable[[int], int], parameters: dict[str, object]) -> None:
    assert causes_of(looked_up(buckets)) == [("relative bias buckets", parameters)]


def test_the_distance_of_the_query_less_the_key() -> None:
    [(name, _)] = causes_of(lambda table: looked_up(bucket)(table).mT)
    assert name == "relative bias reversed"


def test_the_heads_of_a_bias_in_reverse_order() -> None:
    causes = causes_of(lambda table: looked_up(bucket)(table).flip(0))
    assert causes == [("relative bias reversed", {"heads": "in reverse order"})]


def reshaped_table(table: Tensor) -> Tensor:
    flat = [float(table[n // HEADS, n % HEADS]) for n in range(BUCKETS * HEADS)]
    rows = [[flat[head * BUCKETS + b] for head in range(HEADS)] for b in range(BUCKETS)]
    return looked_up(bucket)(torch.tensor(rows, dtype=torch.float64))


def reshaped_bias(table: Tensor) -> Tensor:
    flat = looked_up(bucket)(table).permute(1, 2, 0).flatten().tolist()
    return torch.tensor(flat, dtype=torch.float64).view(HEADS, TOKENS, TOKENS)


@pytest.mark.parametrize("bias", [reshaped_table, reshaped_bias])
def test_a_bias_read_in_another_order_of_axes(bias: Callable[[Tensor], Tensor]) -> None:
    [(name, _)] = causes_of(bias)
    assert name == "relative bias reshaped"


NEAR = {
    "two buckets exchanged": lambda table: looked_up(bucket)(table[[0, 2, 1, *range(3, BUCKETS)]]),
    "a table that is flipped": lambda table: looked_up(bucket)(table.flip(0)),
    "the distance without its sign": looked_up(lambda d: bucket(-abs(d))),
    "heads in another order": lambda table: looked_up(bucket)(table[:, [1, 0, 3, 2]]),
}


@pytest.mark.parametrize("words", others_slow(NEAR))
def test_what_looks_like_these_causes_is_unknown(words: str) -> None:
    assert causes_of(NEAR[words]) == []
