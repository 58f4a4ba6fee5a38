"""Sizes: what shapes and a few counts say together, and what they cannot say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.errors import OptionError, ShapeError
from headwise.layouts.pattern import (
    GROUPED,
    Shape,
    Sizes,
    parse_pattern,
    solve_axis_sizes,
    solve_products,
)

FUSED = "(kv_heads [wq: group head_dim | wk: head_dim | wv: head_dim]) embed_dim"


def solved(
    shapes: dict[str, Shape],
    patterns: dict[str, str],
    splits: dict[str, tuple[str, ...]] | None = None,
    **known: int,
) -> Sizes:
    return solve_axis_sizes(
        {name: (parse_pattern(patterns[name]), shape) for name, shape in shapes.items()},
        known,
        {**GROUPED, **(splits or {})},
    )


def test_one_count_and_one_shape() -> None:
    found = solved({"q": (60, 40)}, {"q": "wq: (heads head_dim) embed_dim"}, heads=6)
    assert found == {"heads": 6, "head_dim": 10, "embed_dim": 40}
    assert solved({"q": (60, 40)}, {"q": "wq: (heads head_dim) embed_dim"}, head_dim=10) == found


def test_the_head_dim_of_a_group() -> None:
    # 2 kv heads, each with 3 query heads, a key and a value: 10 parts of head_dim.
    found = solved({"qkv": (100, 40)}, {"qkv": FUSED}, heads=6, kv_heads=2)
    assert found == {"heads": 6, "kv_heads": 2, "group": 3, "head_dim": 10, "embed_dim": 40}


def test_kv_heads_follow_from_the_rest() -> None:
    # (6 + 2 n) head_dim = 100 with head_dim 10: an axis that does not grow from 0.
    pattern = "([wq: heads head_dim | wk: kv_heads head_dim | wv: kv_heads head_dim]) embed_dim"
    found = solved({"qkv": (100, 40)}, {"qkv": pattern}, heads=6, head_dim=10)
    assert (found["kv_heads"], found["group"]) == (2, 3)


def test_one_tensor_says_what_another_needs() -> None:
    patterns = {
        "q": "wq: (heads head_dim) embed_dim",
        "k": "wk: (kv_heads head_dim) source_dim",
        "v": "wv: (kv_heads value_dim) source_dim",
        "o": "wo: out_dim (heads value_dim)",
    }
    shapes = {"v": (14, 36), "k": (20, 36), "q": (60, 40), "o": (44, 42)}
    found = solved(shapes, patterns, heads=6)
    assert found == {
        "heads": 6,
        "kv_heads": 2,
        "group": 3,
        "head_dim": 10,
        "value_dim": 7,
        "embed_dim": 40,
        "source_dim": 36,
        "out_dim": 44,
    }


def test_a_sink_says_the_heads() -> None:
    patterns = {"s": "sink: heads", "q": "wq: (heads head_dim) embed_dim"}
    assert solved({"q": (60, 40), "s": (6,)}, patterns)["head_dim"] == 10


def test_shards_of_a_fixed_number() -> None:
    pattern = "wq: (shard local_heads head_dim) embed_dim"
    splits = {"heads": ("shard", "local_heads")}
    found = solved({"q": (120, 40)}, {"q": pattern}, splits, shard=4, heads=12)
    assert found["local_heads"] == 3
    with pytest.raises(ShapeError, match="heads 6, shard 4"):
        solved({"q": (120, 40)}, {"q": pattern}, splits, shard=4, heads=6)


def test_products() -> None:
    assert solve_products({"heads": 6, "group": 3}, GROUPED)["kv_heads"] == 2
    assert solve_products({"kv_heads": 2, "group": 3}, GROUPED)["heads"] == 6
    assert solve_products({"heads": 6}, GROUPED) == {"heads": 6}
    assert solve_products({}, {"kv_heads": ()}) == {"kv_heads": 1}


@pytest.mark.parametrize(
    ("known", "splits", "words"),
    [
        ({"heads": 7, "kv_heads": 2}, GROUPED, ("heads 7, kv_heads 2", "kv_heads divides")),
        ({"heads": 6, "kv_heads": 2, "group": 2}, GROUPED, ("heads 6, kv_heads 2", "heads 4")),
        ({"kv_heads": 3}, {"kv_heads": ()}, ("kv_heads 3", "kv_heads 1, whatever the model")),
    ],
)
def test_counts_that_contradict_each_other(
    known: dict[str, int], splits: dict[str, tuple[str, ...]], words: tuple[str, str]
) -> None:
    with pytest.raises(ShapeError) as refused:
        solve_products(known, splits)
    assert words[0] in refused.value.saw
    assert words[1] in refused.value.needed


def test_a_count_of_none_is_refused_and_no_division_by_it() -> None:
    for known in ({"heads": 6, "kv_heads": 0}, {"heads": -6}):
        with pytest.raises(OptionError, match="counts of at least 1"):
            solve_axis_sizes({}, known, GROUPED)


def test_what_no_shape_tells_is_asked_for_by_the_names_of_a_config() -> None:
    with pytest.raises(OptionError) as refused:
        solved({"qkv": (100, 40)}, {"qkv": FUSED})
    assert refused.value.saw == "qkv, an axis of 100; known are embed_dim 40"
    assert refused.value.needed == "the sizes of group, head_dim, kv_heads"
    assert refused.value.do.startswith("give heads and kv_heads, ")
    with pytest.raises(OptionError, match="do:     give heads, "):
        solved({"q": (60, 40)}, {"q": "wq: (heads head_dim) embed_dim"})


@pytest.mark.parametrize(
    ("shapes", "known", "saw", "needed"),
    [
        ({"q": (60, 40, 1)}, {"heads": 6}, "q of shape (60, 40, 1)", "2 axes"),
        ({"q": (60, 40)}, {"heads": 7}, "an axis of 60, with heads 7", "whole number of head_dim"),
        ({"q": (60, 40)}, {"heads": 6, "head_dim": 9}, "q has an axis of 60", "54, with heads 6"),
        ({"q": (60, 40), "k": (20, 41)}, {"heads": 6}, "k has an axis of 41", "40, with heads 6"),
        ({"q": (60, 0)}, {"heads": 6}, "q has an axis of 0", "whole number of embed_dim"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_with_their_numbers(
    shapes: dict[str, Shape], known: dict[str, int], saw: str, needed: str
) -> None:
    patterns = {
        "q": "wq: (heads head_dim) embed_dim",
        "k": "wk: (kv_heads head_dim) embed_dim",
    }
    with pytest.raises(ShapeError) as refused:
        solved(shapes, patterns, **known)
    assert saw in refused.value.saw
    assert needed in refused.value.needed


def test_too_long_a_head_for_what_is_left() -> None:
    # 6 heads of 20 are longer than the 100 rows: kv_heads would be negative.
    pattern = "([wq: heads head_dim | wk: kv_heads head_dim | wv: kv_heads head_dim]) embed_dim"
    with pytest.raises(ShapeError, match="a whole number of kv_heads"):
        solved({"qkv": (100, 40)}, {"qkv": pattern}, heads=6, head_dim=20)


COUNTS = st.integers(1, 9)


@given(kv_heads=COUNTS, group=COUNTS, head_dim=COUNTS, embed_dim=COUNTS)
def test_any_sizes_come_back_from_the_shapes_they_make(
    kv_heads: int, group: int, head_dim: int, embed_dim: int
) -> None:
    sizes = {"kv_heads": kv_heads, "group": group, "head_dim": head_dim, "embed_dim": embed_dim}
    shape = parse_pattern(FUSED).shape(sizes)
    found = solved({"qkv": shape}, {"qkv": FUSED}, heads=kv_heads * group, kv_heads=kv_heads)
    assert found == {**sizes, "heads": kv_heads * group}
