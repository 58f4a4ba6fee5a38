"""Formulas of one layer: closed forms, and the limits in which two ways are the same."""

from __future__ import annotations

import pytest

from headwise.sharding.costs.layer_costs import LayerCosts
from headwise.sharding.costs.model_sizes import ModelSizes
from headwise.sharding.costs.sharding_way import ShardingWay, find_refusal, ways_over

SIZES = ModelSizes(layers=3, embed_dim=40, heads=6, kv_heads=2, head_dim=10, hidden_dim=56)
LLAMA_8B = ModelSizes(layers=32, embed_dim=4096, heads=32, kv_heads=8, head_dim=128)
LLAMA_70B = ModelSizes(layers=80, embed_dim=8192, heads=64, kv_heads=8, head_dim=128)


def costs(
    sizes: ModelSizes = SIZES, *, context: int = 24, batch: int = 3, **groups: int
) -> LayerCosts:
    return LayerCosts(
        sizes=sizes, way=ShardingWay(**groups), batch=batch, context=context, itemsize=2
    )


# Megabytes that a rank sends in one forward pass of 131,072 tokens in bfloat16.
SENT = {
    ("8B", "heads"): {2: 1074, 4: 1611, 8: 1879},
    ("8B", "ring"): {2: 268, 4: 403, 8: 470},
    ("8B", "gather"): {2: 268, 4: 403, 8: 470},
    ("8B", "all-to-all"): {2: 671, 4: 503, 8: 294},
    ("70B", "heads"): {4: 3221, 8: 3758, 16: 4027},
    ("70B", "ring"): {4: 403, 8: 470, 16: 503},
    ("70B", "all-to-all"): {4: 906, 8: 529, 16: 315},
}


@pytest.mark.parametrize(("model", "group"), SENT)
def test_a_published_model_sends_these_megabytes(model: str, group: str) -> None:
    sizes = {"8B": LLAMA_8B, "70B": LLAMA_70B}[model]
    for ranks, megabytes in SENT[model, group].items():
        groups = {group.replace("-", "_"): ranks}
        sent = costs(sizes, context=131_072, batch=1, **groups).sent_forward()
        assert sent.keys() == {group}
        assert sent[group] / 1e6 == pytest.approx(megabytes, abs=0.6)


def test_bytes_of_each_group_by_hand() -> None:
    """Batch 3, 24 tokens, embed_dim 40, 6 heads and 2 kv heads of 10, two bytes a number."""
    tokens = 3 * 24
    assert costs(heads=2).sent_forward() == {"heads": 2 * 1 / 2 * tokens * 40 * 2}
    ring = costs(ring=4)
    assert ring.sent_forward() == {"ring": 3 / 4 * tokens * 2 * 20 * 2}
    # keys and values in three hops; the gradients of three parts to their owners
    hop = tokens / 4 * 2 * 20 * 2
    assert ring.sent_backward()["ring"] == pytest.approx(3 * hop + 3 * hop)
    exchanged = tokens / 2 * (2 * 60 + 2 * 20)
    assert costs(all_to_all=2).sent_forward() == {"all-to-all": exchanged / 2 * 2}


def test_an_all_to_all_over_more_ranks_than_kv_heads_repeats_them() -> None:
    """Each of 6 ranks gets one of 6 copies of 2 kv heads."""
    exchanged = 3 * 24 / 6 * (2 * 60 + 2 * 60)
    assert costs(all_to_all=6).sent_forward() == {
        "all-to-all": pytest.approx(exchanged * 5 / 6 * 2)
    }


def test_heads_divide_what_the_other_groups_send() -> None:
    alone, mixed = costs(ring=4), costs(heads=2, ring=4)
    assert mixed.sent_forward()["ring"] == alone.sent_forward()["ring"] / 2
    assert mixed.sent_forward()["heads"] == costs(heads=2).sent_forward()["heads"] / 4
    # a rank has at least one kv head, so six ranks of heads send no less than two
    more = costs(heads=6, ring=4).sent_forward()["ring"]
    assert more == mixed.sent_forward()["ring"]


def test_an_all_to_all_within_a_ring_sends_the_ring_of_its_heads() -> None:
    mixed = costs(all_to_all=2, ring=4)
    assert mixed.sent_forward()["ring"] == costs(ring=4).sent_forward()["ring"] / 2
    assert mixed.sent_forward()["all-to-all"] == pytest.approx(
        costs(all_to_all=2).sent_forward()["all-to-all"] / 4
    )


def test_one_rank_sends_nothing() -> None:
    layer = costs()
    assert layer.sent_forward() == layer.sent_backward() == layer.sent_for_mlp() == {}
    assert layer.sent_for_weights() == (0, 0)
    assert layer.buffer_bytes() == layer.gradient_buffer_bytes() == 0


@pytest.mark.parametrize("window", [None, 1, 5, 24, 99])
@pytest.mark.parametrize("causal", [True, False])
def test_attended_pairs_are_counted(window: int | None, causal: bool) -> None:
    layer = LayerCosts(
        sizes=SIZES,
        way=ShardingWay(),
        batch=3,
        context=24,
        itemsize=2,
        causal=causal,
        window=window,
    )
    width = window or 24
    pairs = [
        (query, key)
        for query in range(24)
        for key in range(24)
        if abs(query - key) < width and (key <= query or not causal)
    ]
    assert layer.total_attended_pairs() == 3 * len(pairs)


def test_operations_are_divided_over_all_ranks() -> None:
    whole, shared = costs(), costs(heads=2, all_to_all=3, ring=4)
    assert whole.attention_operations()[0] == 2 * 2 * whole.total_attended_pairs() * 60
    assert whole.attention_operations()[1] == 2.5 * whole.attention_operations()[0]
    for before, after in zip(
        whole.attention_operations(), shared.attention_operations(), strict=True
    ):
        assert after == pytest.approx(before / 24)
    weights = SIZES.attention_weights + SIZES.mlp_weights
    assert weights == 40 * (6 + 2 + 2 + 6) * 10 + 3 * 40 * 56
    assert whole.projection_operations() == (2 * 72 * weights, 4 * 72 * weights)


def test_memory_by_hand() -> None:
    layer = costs(heads=2, gather=4)
    tokens = 3 * 24 / 4
    # input twice, queries, outputs twice, gathered keys and values whole and in parts
    kept = 40 + 40 + 30 + 2 * 30 + 2 * (2 * 10 * 4)
    assert layer.attention_bytes() == tokens * (kept * 2 + 3 * 4)
    assert layer.keys_and_values_bytes() == tokens * 2 * 10 * 2
    assert layer.mlp_bytes() == tokens * (40 + 40 + 4 * 56 / 2) * 2
    assert layer.weight_bytes == 2 * (40 * (3 + 1 + 1 + 3) * 10 + 3 * 40 * 56 / 2)


def test_every_way_is_listed_once() -> None:
    ways = list(ways_over(12))
    assert len(ways) == len(set(ways))
    assert all(way.gpus == 12 for way in ways)
    assert ShardingWay(heads=2, all_to_all=2, ring=3) in ways
    assert not any(way.gather > 1 and way.ring > 1 for way in ways)
    assert [str(way) for way in ways_over(1)] == ["one GPU"]


def test_ways_that_heads_do_not_divide_are_refused() -> None:
    assert find_refusal(ShardingWay(heads=4), SIZES, 24) == "heads 4 does not divide 6 query heads"
    assert find_refusal(ShardingWay(heads=3), SIZES, 24) == (
        "heads 3 neither divides 2 kv heads nor is a multiple of them"
    )
    assert find_refusal(ShardingWay(heads=6), SIZES, 24) is None
    assert find_refusal(ShardingWay(heads=2, all_to_all=2), SIZES, 24) == (
        "all-to-all 2 does not divide 3 query heads"
    )
    assert find_refusal(ShardingWay(ring=25), SIZES, 24) == "24 tokens are fewer than 25 ranks"


def test_groups_across_nodes() -> None:
    """The groups are nested, the first within a node."""
    way = ShardingWay(heads=4, all_to_all=2, ring=3)
    assert way.groups_across_nodes(8) == {"ring"}
    assert way.groups_across_nodes(4) == {"all-to-all", "ring"}
    assert way.groups_across_nodes(24) == set()
    assert ShardingWay(heads=3, ring=4).groups_across_nodes(8) == {"heads", "ring"}
    assert ShardingWay(heads=3, ring=2).groups_across_nodes(8) == set()


def test_headwise_divides_tokens_in_one_way_at_a_time() -> None:
    assert ShardingWay(heads=4, ring=2).is_in_headwise
    assert not ShardingWay(all_to_all=4, ring=2).is_in_headwise
