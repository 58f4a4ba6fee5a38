"""Plans: what fits, what is fastest, and how both follow from the stated GPUs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from headwise.errors import OptionError
from headwise.sharding.costs.cost_plan import CostPlan, plan_costs
from headwise.sharding.costs.layer_costs import LayerCosts
from headwise.sharding.costs.model_sizes import ModelSizes
from headwise.sharding.costs.sharding_way import ShardingWay
from headwise.sharding.costs.step_costs import Machine, StepCosts
from tests.refusals import refusals
from tests.root import ROOT

LLAMA_8B = ROOT / "examples" / "configs" / "llama-3.1-8b.json"
SIZES = ModelSizes(
    layers=3, embed_dim=40, heads=6, kv_heads=2, head_dim=10, hidden_dim=56, vocabulary=99
)


def plan(**options: Any) -> CostPlan:
    return plan_costs(LLAMA_8B, **{"gpus": 64, "context": 131_072, **options})


def step(machine: Machine, *, checkpointing: bool = False, **groups: int) -> StepCosts:
    layer = LayerCosts(
        sizes=SIZES, way=ShardingWay(**groups), batch=3, context=24, itemsize=2, window=None
    )
    return StepCosts(layer=layer, machine=machine, checkpointing=checkpointing)


# A byte a second and an operation a second, and the other for free.
SENDING = Machine(within=1e-9, across=1e-10, node=4, teraflops=1e30)
COMPUTING = Machine(within=1e30, across=1e30, node=4, teraflops=1e-12)


def test_time_is_that_of_bytes_where_operations_are_free() -> None:
    exchange = step(SENDING, all_to_all=2)
    layer = exchange.layer
    weights = layer.sent_for_weights()
    forward = layer.sent_forward()["all-to-all"] + weights[0]
    assert exchange.forward_seconds == pytest.approx(3 * forward)
    backward = layer.sent_backward()["all-to-all"] + weights[1]
    assert exchange.backward_seconds == pytest.approx(3 * backward)
    heads = step(SENDING, heads=2)
    sums = heads.layer.sent_forward()["heads"] + heads.layer.sent_for_mlp()["heads"]
    assert heads.forward_seconds == pytest.approx(3 * sums)


def test_a_group_across_nodes_has_the_bandwidth_between_them() -> None:
    """Two ranks of heads stay within a node of 4, and the ring of 4 pairs does not."""
    mixed = step(SENDING, heads=2, ring=4)
    layer = mixed.layer
    within = layer.sent_forward()["heads"] + layer.sent_for_mlp()["heads"]
    across = layer.sent_forward()["ring"] + layer.sent_for_weights()[0]
    assert mixed.forward_seconds == pytest.approx(3 * (within + 10 * across))


def test_time_is_that_of_operations_where_sending_is_free() -> None:
    ring = step(COMPUTING, ring=4)
    operations = [
        attention + other
        for attention, other in zip(
            ring.layer.attention_operations(), ring.layer.projection_operations(), strict=True
        )
    ]
    unembedding = 2 * 18 * 99 * 40
    assert ring.forward_seconds == pytest.approx(3 * operations[0] + unembedding)
    assert ring.backward_seconds == pytest.approx(3 * operations[1] + 2 * unembedding)
    again = step(COMPUTING, checkpointing=True, ring=4)
    assert again.backward_seconds - ring.backward_seconds == pytest.approx(3 * operations[0])


def test_a_ring_hides_behind_its_products_and_an_exchange_does_not() -> None:
    machine = replace(COMPUTING, within=1e-9)
    ring, exchange = step(machine, ring=2), step(machine, all_to_all=2)
    sent = exchange.layer.sent_forward()["all-to-all"]
    assert exchange.forward_seconds - ring.forward_seconds == pytest.approx(3 * sent)


def test_memory_of_a_step_by_hand() -> None:
    ring = step(SENDING, ring=4)
    weights = SIZES.layers * (SIZES.attention_weights + SIZES.mlp_weights)
    vocabulary = 2 * 99 * 40
    kept = ring.layer.attention_bytes() + ring.layer.mlp_bytes()
    gathered = 3 * ring.layer.weight_bytes + vocabulary * 2
    states = (weights + vocabulary) / 4 * (2 + 2 + 8)
    # Gradients of queries twice, and eight times keys and values, 18 tokens and 2 bytes a number.
    buffers = 18 * (2 * 60 + 8 * 2 * 20) * 2
    assert ring.layer.gradient_buffer_bytes() == buffers
    assert ring.step_bytes == pytest.approx(states + gathered + 3 * kept + buffers)
    again = step(SENDING, checkpointing=True, ring=4)
    inputs = 18 * 40 * 2
    assert ring.step_bytes - again.step_bytes == pytest.approx(2 * kept - 3 * inputs)
    alone = step(SENDING)
    assert alone.forward_bytes == pytest.approx(
        (weights + vocabulary) * 2
        + 3 * alone.layer.keys_and_values_bytes()
        + max(alone.layer.attention_bytes(), alone.layer.mlp_bytes())
    )


def test_layers_with_a_window_compute_less() -> None:
    narrow = replace(SIZES, windows=(None, 3, 3))
    whole, partly = step(COMPUTING), step(COMPUTING)
    partly = replace(partly, layer=replace(partly.layer, sizes=narrow))
    windowed = replace(whole.layer, window=3)
    less = whole.layer.attention_operations()[0] - windowed.attention_operations()[0]
    assert whole.forward_seconds - partly.forward_seconds == pytest.approx(2 * less)


def test_the_fastest_fits() -> None:
    whole = plan(gpus=8)
    assert whole.fastest_step is None
    assert whole.fastest_forward is not None
    assert whole.smallest_step.step_bytes == min(s.step_bytes for s in whole.possible)
    kept = plan(gpus=8, checkpointing=True)
    assert kept.fastest_step is not None
    assert kept.fastest_step.fits_step
    fitting = [s.step_seconds for s in kept.possible if s.fits_step]
    assert kept.fastest_step.step_seconds == min(fitting)
    assert kept.fastest_step_in_headwise is not None
    assert kept.fastest_step_in_headwise.way.is_in_headwise


def test_a_slow_wire_between_nodes_prefers_heads_within_them() -> None:
    fastest = plan(gpus=512, machine=Machine(across=10)).fastest_step
    assert fastest is not None
    assert fastest.way.heads == 8


def test_a_row_for_each_kind_and_the_reasons_of_the_others() -> None:
    costs = plan()
    kinds = [s.way.kind for s in costs.best_step_of_each_kind]
    assert len(kinds) == len(set(kinds))
    assert not set(kinds) & costs.refused.keys()
    assert costs.refused["heads"] == "heads 64 does not divide 32 query heads"
    assert {"ring", "gather", "heads x ring", "all-to-all x ring"} <= set(kinds)
    times = [s.step_seconds for s in costs.best_step_of_each_kind if s.fits_step]
    assert times == sorted(times)


def test_json_holds_every_number() -> None:
    costs = plan()
    written = json.loads(json.dumps(costs.to_json()))
    assert written["computed"] is True
    assert written["fastest"]["training"] == str(costs.fastest_step and costs.fastest_step.way)
    first = written["ways"][0]
    assert first["layer"]["sent_forward"] == costs.best_step_of_each_kind[0].layer.sent_forward()
    assert first["training"]["fits"] is True


test_refusals = refusals(
    {
        "no GPU": (lambda: plan(gpus=0), ("gpus 0", "whole number from 1")),
        "half a GPU": (lambda: plan(gpus=1.5), ("gpus 1.5",)),
        "no tokens": (lambda: plan(context=0), ("context 0",)),
        "a boolean": (lambda: plan(batch=True), ("batch True",)),
        "int8": (lambda: plan(dtype="int8"), ("a dtype 'int8'", "float64, float32")),
        "no wire": (lambda: plan(machine=Machine(within=0)), ("within 0",)),
        "no memory": (lambda: plan(machine=Machine(memory=float("nan"))), ("memory nan",)),
    },
    kind=OptionError,
)
