"""Shares of tensor-parallel processes: each is the layout of a model with a part of the heads."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.errors import OptionError, ShapeError
from headwise.function.weights import AXES
from headwise.layouts._layout import Layout
from headwise.layouts.pattern import find_axis_led_by, parse_pattern
from headwise.layouts.registry import layout, layouts_by_name
from headwise.layouts.shards import (
    ShardedAxis,
    derive_shard_map_from_shares,
    derive_shard_map_from_whole,
    find_known_length,
)
from tests.layouts.examples import example, known_of, width_of
from tests.refusals import refusals

SHARDED = [each.name for each in layouts_by_name().values() if each.sharded]
COUNT = 3  # of 12 heads and 3 kv heads


def prefix_of(stored: Layout) -> str:
    return next(iter(stored.where.values())).format(layer=0)


def of_rank(name: str, x: Tensor, rank: int, count: int) -> Tensor:
    """A rank's heads of a canonical tensor; all of a tensor without heads."""
    dim = next((d for d, axis in enumerate(AXES[name]) if axis in ("heads", "kv_heads")), None)
    return x if dim is None else x.chunk(count, dim=dim)[rank]


def shares_by_hand(stored: Layout, state: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """What the layout writes for a model that has a part of the heads."""
    ranks = [{n: of_rank(n, x, rank, count) for n, x in state.items()} for rank in range(count)]
    return [stored.pack(canonical, **width_of(stored)) for canonical in ranks]


def shapes(state: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in state.items()}


@pytest.mark.parametrize("name", SHARDED)
def test_a_share_is_the_layout_of_a_part_of_the_heads(name: str) -> None:
    stored, state = layout(name), example(layout(name))
    # Layouts with as many kv heads as heads have 12 of both.
    prefix, known = prefix_of(stored), known_of(stored)
    whole = {prefix + local: x for local, x in stored.pack(state, **width_of(stored)).items()}
    expected = [
        {prefix + local: x for local, x in share.items()}
        for share in shares_by_hand(stored, state, COUNT)
    ]
    division = derive_shard_map_from_whole(stored, shapes(whole), COUNT, known)
    for tensor, x in whole.items():
        for share, by_hand in zip(division.split(tensor, x), expected, strict=True):
            assert torch.equal(share, by_hand[tensor]), tensor
            assert division.share_shape(tensor, tuple(x.shape)) == tuple(share.shape)
    again = derive_shard_map_from_shares(stored, shapes(expected[0]), COUNT, known)
    assert again == division
    for tensor, x in whole.items():
        assert torch.equal(again.join(tensor, [share[tensor] for share in expected]), x), tensor
        assert again.whole_shape(tensor, tuple(expected[0][tensor].shape)) == tuple(x.shape)


@pytest.mark.parametrize("name", ["megatron", "megatron-gated", "megatron-gpt"])
def test_rows_of_a_group_need_no_counts(name: str) -> None:
    stored = layout(name)
    whole = stored.pack(example(stored), **width_of(stored))
    share = {
        prefix_of(stored) + local: x
        for local, x in shares_by_hand(stored, example(stored), 3)[0].items()
    }
    division = derive_shard_map_from_shares(stored, shapes(share), COUNT, {})
    joined = division.whole_shape(
        f"{prefix_of(stored)}linear_qkv.weight",
        tuple(share[f"{prefix_of(stored)}linear_qkv.weight"].shape),
    )
    assert joined == tuple(whole["linear_qkv.weight"].shape)


# ---- weights outside of attention ---------------------------------------------------------------

LAYER = "decoder.layers.0."


def megatron(heads: int, kv_heads: int, inner: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """A layer of 40 channels, heads of 10."""
    attention = f"{LAYER}self_attention."
    return {
        f"{attention}linear_qkv.weight": ((heads + 2 * kv_heads) * 10, 40),
        f"{attention}linear_proj.weight": (40, heads * 10),
        f"{attention}linear_qkv.layer_norm_weight": (40,),
        f"{LAYER}mlp.linear_fc1.weight": (2 * inner, 40),
        f"{LAYER}mlp.linear_fc2.weight": (40, inner),
        "embedding.word_embeddings.weight": (vocabulary, 40),
        "output_layer.weight": (vocabulary, 40),
        "decoder.final_layernorm.weight": (40,),
    }


def test_a_gate_and_its_partner_are_divided_by_themselves() -> None:
    known = {"heads": 6, "kv_heads": 2, "head_dim": 10}
    division = derive_shard_map_from_shares(layout("megatron"), megatron(3, 1, 28, 17), 2, known)
    assert division.axes == {
        f"{LAYER}self_attention.linear_qkv.weight": ShardedAxis(0),
        f"{LAYER}self_attention.linear_proj.weight": ShardedAxis(1),
        f"{LAYER}mlp.linear_fc1.weight": ShardedAxis(0, blocks=(28, 28)),
        f"{LAYER}mlp.linear_fc2.weight": ShardedAxis(1),
        "embedding.word_embeddings.weight": ShardedAxis(0),
        "output_layer.weight": ShardedAxis(0),
    }
    assert (
        derive_shard_map_from_whole(layout("megatron"), megatron(6, 2, 56, 34), 2, known)
        == division
    )
    gate, up = torch.randn(2, 56, 40)
    shares = [torch.cat([gate[:28], up[:28]]), torch.cat([gate[28:], up[28:]])]
    name = f"{LAYER}mlp.linear_fc1.weight"
    assert torch.equal(division.join(name, shares), torch.cat([gate, up]))
    for share, back in zip(shares, division.split(name, torch.cat([gate, up])), strict=True):
        assert torch.equal(share, back)


def test_a_gate_does_not_fit_an_mlp_of_two_matrices() -> None:
    with pytest.raises(ShapeError):
        derive_shard_map_from_shares(layout("megatron-gpt"), megatron(3, 1, 28, 17), 2, {})


def meta(heads: int, kv_heads: int, inner: int, tokens: tuple[int, int]) -> dict[str, Any]:
    layer, width = "layers.0.", 60
    return {
        "tok_embeddings.weight": tokens,
        f"{layer}attention.wq.weight": (heads * 10, width),
        f"{layer}attention.wk.weight": (kv_heads * 10, width),
        f"{layer}attention.wv.weight": (kv_heads * 10, width),
        f"{layer}attention.wo.weight": (width, heads * 10),
        f"{layer}feed_forward.w1.weight": (inner, width),
        f"{layer}feed_forward.w2.weight": (width, inner),
        f"{layer}feed_forward.w3.weight": (inner, width),
        "norm.weight": (width,),
    }


def test_an_embedding_is_divided_by_its_rows_or_its_columns() -> None:
    known = {"heads": 6, "kv_heads": 2}
    for tokens, dim in (((17, 60), 0), ((34, 30), 1)):
        division = derive_shard_map_from_shares(
            layout("llama-meta"), meta(3, 1, 28, tokens), 2, known
        )
        assert division.axes["tok_embeddings.weight"] == ShardedAxis(dim)
        whole = derive_shard_map_from_whole(
            layout("llama-meta"), meta(6, 2, 56, (34, 60)), 2, known, also=dim == 1
        )
        assert whole == division


def test_fewer_kv_heads_than_shares_are_held_by_neighbours() -> None:
    known = {"heads": 6, "kv_heads": 2}
    division = derive_shard_map_from_shares(layout("llama-meta"), meta(1, 1, 28, (6, 60)), 6, known)
    name = "layers.0.attention.wk.weight"
    assert division.axes[name] == ShardedAxis(0, copies=3)
    first, second = torch.randn(2, 10, 60)
    shares = [first] * 3 + [second] * 3
    assert torch.equal(division.join(name, shares), torch.cat([first, second]))
    for share, back in zip(shares, division.split(name, torch.cat([first, second])), strict=True):
        assert torch.equal(share, back)
    assert (
        derive_shard_map_from_whole(layout("llama-meta"), meta(6, 2, 168, (36, 60)), 6, known)
        == division
    )


def test_the_heads_of_the_model_tell_how_many_shares_there_are() -> None:
    known = {"heads": 6, "kv_heads": 2, "head_dim": 10}
    name, share, whole = find_known_length(layout("llama-meta"), meta(3, 1, 28, (6, 60)), known)  # type: ignore[misc]
    assert (name, share, whole) == ("layers.0.attention.wq.weight", 30, 60)
    assert find_known_length(layout("llama-meta"), meta(3, 1, 28, (6, 60)), {"heads": 6}) is None
    fused = find_known_length(layout("megatron"), megatron(3, 1, 28, 17), known)
    assert fused == (f"{LAYER}self_attention.linear_qkv.weight", 50, 100)


# ---- refusals -----------------------------------------------------------------------------------

KNOWN = {"heads": 6, "kv_heads": 2, "head_dim": 10}
WHOLE = meta(6, 2, 56, (34, 60))


def whole(count: int, name: str = "llama-meta", of: Any = WHOLE) -> Any:
    return derive_shard_map_from_whole(layout(name), of, count, KNOWN)


test_refusals = refusals(
    {
        "heads": (lambda: whole(4), ShapeError, ("4 shares of", "heads 6")),
        "kv heads": (lambda: whole(3), ShapeError, ("3 shares of", "kv_heads 2")),
        "hidden channels": (
            lambda: whole(2, of=meta(6, 2, 55, (34, 60))),
            ShapeError,
            ("2 shares of layers.0.feed_forward.w", "hidden_dim 55"),
        ),
        "vocabulary": (
            lambda: whole(2, of=meta(6, 2, 56, (33, 60))),
            ShapeError,
            ("2 shares of tok_embeddings.weight", "vocabulary 33"),
        ),
        "groups": (
            lambda: whole(4, "megatron", megatron(6, 2, 56, 34)),
            ShapeError,
            ("4 shares of", "kv_heads 2"),
        ),
        "shares of kv heads": (
            lambda: derive_shard_map_from_shares(
                layout("megatron"), megatron(3, 1, 28, 17), 4, KNOWN
            ),
            ShapeError,
            ("4 shares of", "kv_heads 2"),
        ),
        "no division": (
            lambda: derive_shard_map_from_shares(layout("gpt2"), megatron(3, 1, 28, 17), 2, {}),
            OptionError,
            ("as shares of gpt2", "names the axes"),
        ),
        "an inner name": (
            lambda: find_axis_led_by(parse_pattern("wq: (head_dim heads) embed_dim"), ["heads"]),
            OptionError,
            ("the axis of wq that is divided by heads",),
        ),
    }
)
