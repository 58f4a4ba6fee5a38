"""The language of patterns: what is read, what is refused, and where every number goes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headwise.errors import DTypeError, OptionError, ShapeError
from headwise.layouts.pattern import (
    Pattern,
    PatternAxis,
    PatternBlock,
    canonical_shape,
    names_by_canonical_axis,
    pack_tensors,
    parse_pattern,
    unpack_tensor,
)

# kv_heads 2, group 3: six heads; no two axes are of one length
SIZES = {"heads": 6, "kv_heads": 2, "group": 3, "head_dim": 10, "value_dim": 7, "embed_dim": 40}


def numbered(*shape: int) -> Tensor:
    """Entries from 1 on, so that each says where it came from."""
    return torch.arange(1, torch.Size(shape).numel() + 1).reshape(shape)


def test_names_and_products() -> None:
    assert parse_pattern("wq: (heads head_dim) embed_dim") == Pattern(
        (PatternAxis(("heads", "head_dim")), PatternAxis(("embed_dim",))), ("wq",), None
    )
    assert parse_pattern("bo:out_dim") == parse_pattern("  bo:  out_dim ")
    assert parse_pattern("extra_k: () () (heads head_dim)").shape(SIZES) == (1, 1, 60)


def test_fused_axes() -> None:
    pattern = parse_pattern(
        "(kv_heads [wq: group head_dim | wk: head_dim | wv: head_dim]) embed_dim"
    )
    blocks = (
        PatternBlock("wq", ("group", "head_dim")),
        PatternBlock("wk", ("head_dim",)),
        PatternBlock("wv", ("head_dim",)),
    )
    assert pattern == Pattern(
        (PatternAxis(("kv_heads",), blocks), PatternAxis(("embed_dim",))), ("wq", "wk", "wv"), 0
    )
    assert pattern.shape(SIZES) == (2 * (3 + 2) * 10, 40)
    assert pattern.axis_names() == {"kv_heads", "group", "head_dim", "embed_dim"}
    assert pattern.names_of("wq") == ("kv_heads", "group", "head_dim", "embed_dim")
    assert pattern.names_of("wv") == ("kv_heads", "head_dim", "embed_dim")


def test_a_block_without_names_is_one_entry() -> None:
    pattern = parse_pattern("(heads head_dim [wq: | wk: | wv:]) embed_dim")  # Megatron's first
    assert pattern.axes[0].after == ()
    assert pattern.shape(SIZES) == (6 * 10 * 3, 40)


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        ("", "either one tensor's name before its axes, or one pair of []"),
        ("(heads head_dim) embed_dim", "either one tensor's name before its axes"),
        ("wq: ([wq: heads | wk: heads]) embed_dim", "either one tensor's name"),
        ("([wq: heads | wk: heads]) ([wv: heads | wo: heads])", "or one pair of []"),
        ("wq: (heads head_dim embed_dim", "a ) at the end"),
        ("wq: heads) embed_dim", "an axis where ')' stands"),
        ("wq: heads: embed_dim", "an axis where 'heads:' stands"),
        ("wq: (heads (head_dim)) embed_dim", "a name or one [ ] where '(' stands"),
        ("[wq: heads | wk: heads] embed_dim", "an axis where '[' stands"),
        ("([wq: heads][wk: heads]) embed_dim", "a name or one [ ] where '[' stands"),
        ("([wq: heads | wk: heads) embed_dim", "a block such as 'wq: heads head_dim' where ')'"),
        ("([wq: heads | wk: heads", "a ] after the blocks"),
        ("([heads | wk: heads]) embed_dim", "a block such as 'wq: heads head_dim' where 'heads'"),
        ("([]) embed_dim", "a tensor's name in every block"),
        ("([wq: heads | ]) embed_dim", "a tensor's name in every block"),
        ("([wq: heads | wq: heads]) embed_dim", "every tensor in one block"),
        ("wq: heads*head_dim embed_dim", "not '*'"),
        ("wq: 3 embed_dim", "not '3'"),
    ],
)
def test_what_is_no_pattern_is_refused_with_the_place(text: str, needed: str) -> None:
    with pytest.raises(OptionError) as refused:
        parse_pattern(text)
    assert repr(text) in refused.value.saw
    assert needed in refused.value.needed


def test_three_nestings_of_one_shape_differ() -> None:
    """[3, H, d], [H, 3, d] and [H, d, 3], of 6 heads, by hand."""
    stored = numbered(6 * 10 * 3, 40)
    side_by_side = unpack_tensor(
        parse_pattern("([wq: heads head_dim | wk: heads head_dim | wv: heads head_dim]) embed_dim"),
        stored,
        SIZES,
    )
    by_head = unpack_tensor(
        parse_pattern("(heads [wq: head_dim | wk: head_dim | wv: head_dim]) embed_dim"),
        stored,
        SIZES,
    )
    by_row = unpack_tensor(
        parse_pattern("(heads head_dim [wq: | wk: | wv:]) embed_dim"), stored, SIZES
    )
    for number, name in enumerate(("wq", "wk", "wv")):
        assert torch.equal(side_by_side[name], stored.view(3, 6, 10, 40)[number])
        assert torch.equal(by_head[name], stored.view(6, 3, 10, 40)[:, number])
        assert torch.equal(by_row[name], stored.view(6, 10, 3, 40)[:, :, number])


def test_groups_are_blocks_or_tiles_as_the_pattern_says() -> None:
    stored = numbered(60, 40)
    block = unpack_tensor(parse_pattern("wq: (kv_heads group head_dim) embed_dim"), stored, SIZES)[
        "wq"
    ]
    tile = unpack_tensor(parse_pattern("wq: (group kv_heads head_dim) embed_dim"), stored, SIZES)[
        "wq"
    ]
    by_head = stored.view(6, 10, 40)
    assert torch.equal(block, by_head)
    # Stored head g * 2 + k is tiled: it reads kv head k, and is canonical head k * 3 + g.
    assert torch.equal(tile, by_head[[0, 2, 4, 1, 3, 5]])


def test_kv_heads_between_their_query_heads() -> None:
    pattern = parse_pattern(
        "(kv_heads [wq: group head_dim | wk: head_dim | wv: value_dim]) embed_dim"
    )
    stored = numbered(2 * (30 + 10 + 7), 40)
    found = unpack_tensor(pattern, stored, SIZES)
    assert torch.equal(found["wq"][3], stored[47:57])
    assert torch.equal(found["wk"][1], stored[77:87])
    assert torch.equal(found["wv"][1], stored[87:94])
    assert torch.equal(pack_tensors(pattern, found, SIZES), stored)


def test_a_transposed_matrix_and_a_split_axis() -> None:
    wo = numbered(44, 60)
    sizes = SIZES | {"out_dim": 44, "value_dim": 10}
    flat = unpack_tensor(parse_pattern("wo: out_dim (heads value_dim)"), wo, sizes)["wo"]
    assert torch.equal(flat, wo.T.reshape(6, 10, 44))
    apart = unpack_tensor(parse_pattern("wo: out_dim heads value_dim"), wo.view(44, 6, 10), sizes)[
        "wo"
    ]
    assert torch.equal(apart, flat)


def test_an_axis_is_written_by_itself_by_a_wider_one_or_by_its_split() -> None:
    assert names_by_canonical_axis("wk", ("kv_heads", "head_dim", "source_dim")) == [
        ("kv_heads",),
        ("head_dim",),
        ("source_dim",),
    ]
    assert names_by_canonical_axis("wk", ("heads", "head_dim", "embed_dim"))[0] == ("heads",)
    assert names_by_canonical_axis("wq", ("head_dim", "group", "kv_heads", "embed_dim"))[0] == (
        "kv_heads",
        "group",
    )
    shards = {"heads": ("shard", "local_heads")}
    assert names_by_canonical_axis("wq", ("shard", "local_heads", "head_dim", "embed_dim"), shards)[
        0
    ] == (
        "shard",
        "local_heads",
    )
    assert names_by_canonical_axis("wv", ("value_dim", "source_dim"), {"kv_heads": ()})[0] == ()
    assert names_by_canonical_axis("embedding", ("vocabulary", "embed_dim")) == [
        ("embed_dim",),
        ("vocabulary",),
    ]


@pytest.mark.parametrize(
    "names",
    [
        ("heads", "embed_dim"),  # head_dim is missing
        ("heads", "head_dim", "embed_dim", "embed_dim"),
        ("heads", "head_dim", "embed_dim", "depth"),
        ("kv_heads", "head_dim", "embed_dim"),  # a query head is more than its kv head
    ],
)
def test_axes_that_are_not_the_tensors_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(OptionError, match="its axes, each once: heads head_dim query_dim") as error:
        names_by_canonical_axis("wq", names)
    assert " ".join(names) in error.value.saw


def test_canonical_tensors_that_do_not_fit_are_refused() -> None:
    pattern = parse_pattern("wk: (heads head_dim) embed_dim")
    assert canonical_shape(pattern, "wk", SIZES) == (6, 10, 40)
    with pytest.raises(ShapeError, match=r"wk of shape \(2, 10, 40\)\n  needed: \(6, 10, 40\)"):
        pack_tensors(pattern, {"wk": torch.zeros(2, 10, 40)}, SIZES)


def test_dtypes_that_cannot_share_a_tensor_are_refused() -> None:
    pattern = parse_pattern("([wq: heads head_dim | wk: heads head_dim]) embed_dim")
    state = {"wq": torch.zeros(6, 10, 40), "wk": torch.zeros(6, 10, 40, dtype=torch.float16)}
    with pytest.raises(DTypeError, match=r"wq in torch.float32, wk in torch.float16"):
        pack_tensors(pattern, state, SIZES)


def test_what_is_stored_has_memory_of_its_own() -> None:
    pattern, wq = parse_pattern("wq: (heads head_dim) embed_dim"), numbered(6, 10, 40)
    stored = pack_tensors(pattern, {"wq": wq}, SIZES)
    stored.zero_()
    assert bool(wq.all())
    assert stored.is_contiguous()


@st.composite
def patterns(draw: st.DrawFn) -> str:
    """Any nesting of wq, wk and wv in one tensor: what stands before, within and behind the []."""
    within = {"wq": ["group", "head_dim"], "wk": ["head_dim"], "wv": ["head_dim"]}
    shared = draw(st.permutations(["kv_heads", "head_dim"]))
    before, after = [], []
    for name in shared[: draw(st.integers(0, 2))]:
        draw(st.sampled_from([before, after])).append(name)
    outside = {*before, *after}
    order = draw(st.permutations(["wq", "wk", "wv"]))
    blocks = []
    for tensor in order:
        own = [n for n in ["kv_heads", *within[tensor]] if n not in outside]
        blocks.append(f"{tensor}: {' '.join(draw(st.permutations(own)))}")
    fused = f"({' '.join(before)} [{' | '.join(blocks)}] {' '.join(after)})"
    return draw(st.sampled_from([f"{fused} embed_dim", f"embed_dim {fused}"]))


@given(text=patterns())
def test_any_nesting_comes_back_and_no_number_is_lost(text: str) -> None:
    pattern = parse_pattern(text)
    stored = numbered(*pattern.shape(SIZES))
    canonical = unpack_tensor(pattern, stored, SIZES)
    assert {name: tuple(x.shape) for name, x in canonical.items()} == {
        "wq": (6, 10, 40),
        "wk": (2, 10, 40),
        "wv": (2, 10, 40),
    }
    together = torch.cat([x.flatten() for x in canonical.values()])
    assert torch.equal(together.sort().values, stored.flatten())
    assert torch.equal(pack_tensors(pattern, canonical, SIZES), stored)
