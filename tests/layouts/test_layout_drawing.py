"""Drawings: what they say of a row is what a conversion does with it."""

from xml.etree import ElementTree

import pytest
import torch

from headwise.errors import ShapeError
from headwise.function.spec import FROM_CONFIG, AttentionSpec, RotaryRule
from headwise.function.weights import AXES, HEADS
from headwise.layouts._layout import Layout
from headwise.layouts.drawing import (
    DrawnCell,
    attention_spec_lines,
    draw,
    draw_axis_strips,
    drawing_sizes,
    rotary_pairs,
)
from headwise.layouts.registry import catalogue_by_family, layout
from tools.layouts_picture import ROW, TOP, draw_panels, draw_rotary_pairs, make_panel

NAMES = sorted(one.name for family in catalogue_by_family().values() for one in family)
GROUPED = Layout(
    name="grouped",
    tensors={
        "qkv": "embed_dim (kv_heads [wq: group head_dim | wk: head_dim | wv: value_dim])",
        "out": "wo: heads value_dim out_dim",
        "out_bias": "bo: out_dim",
    },
    source="here",
    function=AttentionSpec(rotary=RotaryRule(), scale=FROM_CONFIG, softcap=FROM_CONFIG),
    rows="interleaved",
)


def test_by_hand() -> None:
    assert draw(GROUPED, heads=4, kv_heads=2, head_dim=6, value_dim=3, embed_dim=9) == (
        "qkv  (9, 42)\n"
        "  embed_dim (kv_heads [wq: group head_dim | wk: head_dim | wv: value_dim])\n"
        "  columns: 6 for each q and k, 3 for each v\n"
        "     0  q0  q1  k0  v0\n"
        "    21  q2  q3  k1  v1\n"
        "\n"
        "out  (4, 3, 9)\n"
        "  wo: heads value_dim out_dim\n"
        "  axis 0: 1 for each name\n"
        "    0  o0  o1  o2  o3\n"
        "\n"
        "out_bias  (9,), if any\n"
        "  bo: out_dim"
    )


def test_heads_side_by_side_are_as_wide_as_the_embedding() -> None:
    assert drawing_sizes(GROUPED, {"heads": 6, "kv_heads": 2, "head_dim": 10})["embed_dim"] == 60
    assert drawing_sizes(GROUPED, {"heads": 6})["embed_dim"] == 24
    assert drawing_sizes(GROUPED, {"head_dim": 10, "embed_dim": 9})["embed_dim"] == 9
    assert drawing_sizes(GROUPED, {})["embed_dim"] == 12


def test_channels_that_lie_apart() -> None:
    cells = draw_axis_strips(layout("megatron-v1"), drawing_sizes(layout("megatron-v1"), {}))
    rows = cells["query_key_value.weight"][0].cells
    assert [cell.name for cell in rows[:5]] == ["q0.0", "k0.0", "v0.0", "q0.1", "k0.1"]
    drawn = draw(layout("megatron-v1")).splitlines()
    assert "        ... 5 lines of the same kind" in drawn
    assert "    45  q3.3  k3.3  v3.3" in drawn


def test_heads_that_share_a_row_are_listed() -> None:
    cells = draw_axis_strips(layout("flax"), drawing_sizes(layout("flax"), {}))["query.kernel"]
    assert [len(strip.cells) for strip in cells] == [0, 4, 0]
    assert DrawnCell((("wq", (0, 1, 2, 3)),), 0, 4).name == "q0-3"
    assert DrawnCell((("wq", (0, 2)), ("wk", (1,))), 0, 4).name == "q0,2 k1"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_row_that_is_changed_changes_the_head_that_is_drawn_there(name: str) -> None:
    """Behind the drawing: another number in a stored row shows in that tensor's head alone."""
    one = layout(name)
    sizes = drawing_sizes(one, {})
    turned = sizes["shared_width"] if "wr" in one.rotated else sizes["head_dim"]
    canonical = {
        tensor: torch.zeros([sizes[axis] for axis in AXES[tensor]])
        for tensor in one.canonical_tensor_names
    }
    for stored_name, found in draw_axis_strips(one, sizes).items():
        for strip in found:
            for cell in {(at, cell) for at, cell in enumerate(strip.cells) if at in (0, 1, 4)}:
                stored = one.pack(canonical, rotary_width=turned)
                rows = stored[stored_name].narrow(strip.axis, cell[1].start, cell[1].length)
                rows.fill_(1.0)
                known = {name: sizes[name] for name in ("heads", "kv_heads")}
                seen = one.unpack(stored, **known, rotary_width=turned)
                changed = {
                    (tensor, head)
                    for tensor, x in seen.items()
                    for head, of_head in enumerate(
                        x.unbind(HEADS[tensor][0]) if tensor in HEADS else [x]
                    )
                    if bool(of_head.any())
                }
                drawn = {(tensor, head) for tensor, hs in cell[1].owners for head in hs}
                assert changed == drawn


def at_heads(tensor: str) -> int:
    """The axis of a canonical tensor that counts heads; the last one where none does."""
    return next((n for n, axis in enumerate(AXES[tensor]) if axis in ("heads", "kv_heads")), -1)


@pytest.mark.parametrize("name", NAMES)
def test_every_layout_can_be_drawn_in_80_columns(name: str) -> None:
    for given in ({}, {"heads": 8, "head_dim": 6}):
        assert max(map(len, draw(layout(name), **given).splitlines())) <= 80


def test_sizes_that_the_layout_cannot_have_are_refused() -> None:
    with pytest.raises(ShapeError, match="kv_heads 2\n  needed: kv_heads 8, with gpt2"):
        draw(layout("gpt2"), heads=8, kv_heads=2)
    with pytest.raises(ShapeError, match="heads 6, shard 4"):
        draw(layout("codegen"), heads=6)


def test_what_is_in_no_tensor() -> None:
    assert attention_spec_lines(GROUPED, {"head_dim": 10}) == [
        "rotary: interleaved",
        "axes: batch length width",
        "rotated together in q and k: channels 0 and 1, 2 and 3, 4 and 5, ...",
        "left to the model's config: scale, softcap",
    ]
    assert rotary_pairs("half-split", 6) == [(0, 3), (1, 4), (2, 5)]


def test_a_picture_has_a_band_for_each_cell_at_its_place() -> None:
    panel = make_panel(layout("neox"), "query_key_value.weight", 'by <head> & "more"', heads=4)
    drawn = ElementTree.fromstring(draw_panels([panel, panel], alt='a "picture" of <two>'))
    kinds = [part.get("class") for part in drawn if part.tag.endswith("rect")]
    assert kinds[:4] == ["card", "band q", "band k", "band v"]
    assert len(kinds) == 1 + 2 * 12
    tops = [part.get("y") for part in drawn if part.get("class") == "band q odd"]
    assert tops == [str(TOP + ROW * row) for row in (12, 36)] * 2
    assert drawn.get("aria-label") == 'a "picture" of <two>'
    words = [part.text for part in drawn if part.tag.endswith("text")]
    assert words[:5] == ["neox", 'by <head> & "more"', "q0", "0", "k0"]


def test_a_picture_of_the_rotation_has_a_colour_for_each_pair() -> None:
    drawn = draw_rotary_pairs(6, alt="two orders")
    assert "prefers-color-scheme: dark" in drawn
    parts = [part for part in ElementTree.fromstring(drawn) if part.get("class") is not None]
    draw_panels = [
        (p.get("class"), p.get("y")) for p in parts if p.get("class", "").startswith("band")
    ]
    tops = [str(TOP + 2 * ROW * row) for row in range(6)]
    halves, neighbours = draw_panels[:6], draw_panels[6:]
    assert halves == [(f"band {'qkv'[row % 3]}", tops[row]) for row in (0, 3, 1, 4, 2, 5)]
    assert neighbours == [(f"band {'qkv'[row // 2]}", tops[row]) for row in range(6)]
    assert drawn.index("0 with 3") < drawn.index("3 with 0")


def test_a_drawing_has_a_bound() -> None:
    assert drawing_sizes(layout("llama"), {"heads": 128, "head_dim": 512})["heads"] == 128
    with pytest.raises(ShapeError, match="at most 65,536 rows"):
        draw(layout("llama"), heads=100_000)
