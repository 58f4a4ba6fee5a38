"""The moves that are found for classical mistakes, which reshapes alone make here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from headwise.errors import ShapeError
from headwise.function.weights import State
from headwise.identify.moves.find import find_moves
from headwise.identify.moves.maps import join_rows
from headwise.identify.moves.move import apply_moves
from tests.identify.moves.projections import (
    GEOMETRIES,
    assert_same_rows,
    by_channel,
    edited,
    halves,
    is_exact,
    pairs,
    projections,
    refused,
)
from tests.quick import others_slow

Mistake = Callable[[State], State]


def exchanged(first: str, second: str) -> Mistake:
    def exchange(rows: State) -> State:
        names = {first: second, second: first}
        return {name: rows[name[0] + names.get(name[1], name[1])] for name in rows}

    return exchange


def on(edit: Callable[..., torch.Tensor], *roles: str) -> Mistake:
    return lambda rows: edited(rows, edit, *roles)


def nested(rows: State) -> State:
    """Stored (3, heads, d), read (heads, 3, d)."""
    heads, head_dim, _ = rows["wq"].shape
    return refused(rows, lambda x: x.view(heads, 3, head_dim, -1).unbind(1))


def in_groups(rows: State) -> State:
    """Stored [q; k; v], read (kv_heads, group + 1 + 1, d)."""
    (heads, d, _), kv_heads = rows["wq"].shape, rows["wk"].shape[0]
    group = heads // kv_heads
    return refused(rows, lambda x: x.view(kv_heads, group + 2, d, -1).split([group, 1, 1], dim=1))


def cut_early(rows: State) -> State:
    """The slice of k begins one head early, and that of v three rows late, with rows of k again."""
    q, k, v = (join_rows(rows, role).shape[0] for role in "qkv")
    head_dim = rows["wq"].shape[1]

    def cut(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        early = q + k - 3
        return x[:q], x[q - head_dim : q - head_dim + k], x[early : early + v]

    return refused(rows, cut)


def reordered(rows: State) -> State:
    """Stored [q; k; v], read [k; q; v]."""
    q, k, v = (join_rows(rows, role).shape[0] for role in "qkv")
    return refused(rows, lambda x: [x.split([k, q, v])[i] for i in (1, 0, 2)])


def output_groups(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(0, (2, -1)).transpose(0, 1)


def transposed(rows: State, *roles: str) -> State:
    made = (join_rows(rows, role).T.reshape(rows[f"w{role}"].shape) for role in roles)
    return {**rows, **{f"w{role}": x for role, x in zip(roles, made, strict=True)}}


CASES: list[tuple[str, str, Mistake, str]] = [
    ("mha", "q and k exchanged", exchanged("q", "k"), "qk"),
    ("mha", "k and v exchanged", exchanged("k", "v"), "kv"),
    ("mha", "q and v exchanged", exchanged("q", "v"), "qv"),
    ("gqa-of-4", "k and v exchanged", exchanged("k", "v"), "kv"),
    ("mha", "nesting of fused rows", nested, "qkv"),
    ("gqa-of-2", "kv groups of fused rows", in_groups, "qkv"),
    ("gqa-of-4", "kv groups of fused rows", in_groups, "qkv"),
    ("gqa-of-4", "order of fused rows", reordered, "qk"),
    ("mha", "heads interleaved", on(by_channel, "q"), "q"),
    ("gqa-of-4", "heads interleaved", on(by_channel, "o"), "o"),
    ("gqa-of-2", "heads interleaved", on(by_channel, "q", "k", "v"), "qkv"),
    ("mha", "rotary permutation missing", on(pairs, "q", "k"), "qk"),
    ("gqa-of-4", "rotary permutation missing", on(pairs, "k"), "k"),
    ("gqa-of-2", "rotary permutation doubled", on(halves, "q"), "q"),
    ("gqa-of-4", "rotary permutation doubled", on(halves, "q", "k"), "qk"),
    ("gqa-of-4", "output heads in another group order", on(output_groups, "o"), "o"),
    ("gqa-of-4", "kv heads tiled instead of repeated", on(output_groups, "q", "o"), "qo"),
    ("square", "square matrix transposed", lambda rows: transposed(rows, "o"), "o"),
    ("mha", "square matrix transposed", lambda rows: transposed(rows, "q", "k", "v"), "qkv"),
    ("mha", "fused rows cut at another place", cut_early, "kv"),
    ("gqa-of-4", "fused rows cut at another place", cut_early, "kv"),
]


@pytest.mark.parametrize(("geometry", "cause", "mistake", "roles"), CASES)
def test_a_mistake_is_named_and_predicted(
    geometry: str, cause: str, mistake: Mistake, roles: str
) -> None:
    b = projections(geometry)
    a = mistake(b)
    report = find_moves(a, b)
    assert [move.cause.name for move in report.moves] == [cause]
    assert report.moves[0].roles == tuple(roles)
    assert is_exact(report)
    assert_same_rows(apply_moves(report.moves, b), a)


@pytest.mark.parametrize("heads", [2, 4])
def test_the_number_of_heads_that_was_used_is_named(heads: int) -> None:
    """k is permuted as if it had another number of heads, as llama.cpp once did."""
    b = projections("gqa-of-2")
    a = edited(b, lambda x: halves(pairs(x).reshape(-1, 1, x.shape[2]), heads=heads), "k")
    [move] = find_moves(a, b).moves
    assert move.cause.name == "rotary permutation with a wrong number of heads"
    assert (move.roles, dict(move.name.parameters)["heads"]) == (("k",), heads)


@pytest.mark.parametrize("heads", [2, 4])
def test_the_number_of_heads_is_named_for_interleaved_pairs_too(heads: int) -> None:
    b = projections("gqa-of-2")
    a = edited(b, lambda x: pairs(halves(x).reshape(heads, -1, x.shape[2])), "k")
    [move] = find_moves(a, b, is_interleaved=True).moves
    assert move.cause.name == "rotary permutation with a wrong number of heads"
    assert (move.roles, dict(move.name.parameters)["heads"]) == (("k",), heads)


@pytest.mark.parametrize("width", [4, 8])
def test_only_the_rotated_channels_are_permuted(width: int) -> None:
    b = projections("mha")
    a = edited(b, lambda x: torch.cat([pairs(x[:, :width]).flatten(1, 2), x[:, width:]], 1), "q")
    [move] = find_moves(a, b, rotary_width=width).moves
    assert (move.cause.name, dict(move.name.parameters)["width"]) == (
        "rotary permutation missing",
        width,
    )


@pytest.mark.parametrize("geometry", others_slow(GEOMETRIES))
def test_heads_in_any_order_are_found(geometry: str) -> None:
    b = projections(geometry)
    heads = b["wq"].shape[0]
    order = torch.randperm(heads, generator=torch.Generator().manual_seed(3))
    a = edited(b, lambda x: x[order], "q", "o")
    [move] = find_moves(a, b).moves
    assert (move.cause.name, move.roles) == ("heads permuted", ("q", "o"))
    assert dict(move.name.parameters)["order"] == tuple(order.tolist())


def test_shards_that_cut_heads_are_joined_in_the_wrong_order() -> None:
    b = projections("gqa-of-2")
    a = edited(b, lambda x: x.reshape(4, -1, x.shape[2])[[1, 0, 3, 2]], "v")
    [move] = find_moves(a, b).moves
    assert (move.cause.name, move.roles) == ("shards joined in the wrong order", ("v",))
    assert dict(move.name.parameters)["order"] == (1, 0, 3, 2)


def test_equal_rows_need_no_move() -> None:
    b = projections("mha")
    report = find_moves(b, b)
    assert (report.moves, report.unexplained, is_exact(report)) == ((), (), True)


def test_a_changed_entry_is_not_explained() -> None:
    """Every entry is compared, also where the map of all other rows is known."""
    b = projections("mha")
    a = exchanged("q", "k")(b)
    a = edited(a, torch.clone, "v")
    a["wv"][3, 2, 1] += 1
    report = find_moves(a, b)
    assert not is_exact(report)
    assert "v" in report.unexplained


def test_rows_that_are_equal_do_no_harm() -> None:
    """Repeated kv heads, zero rows and rows of ones leave the name as it is."""
    b = projections("mha")
    b["wk"][1::2] = b["wk"][::2]
    b["wq"][2] = 0
    b["wv"][4, 3:] = 1
    b["wo"][:, 5] = b["wo"][0, 5]
    [move] = find_moves(nested(b), b).moves
    assert move.cause.name == "nesting of fused rows"


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ShapeError, match="rows of the shapes"):
        find_moves(projections("mha"), projections("square"))
