"""The order of head_dim: neighbours (2i, 2i + 1) and halves (i, i + width / 2)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headwise.errors import ShapeError
from headwise.function.spec import AttentionSpec, RotaryRule
from headwise.function.weights import AXES, ROTATED
from headwise.layouts._layout import Layout
from headwise.layouts.pattern import to_half_split, to_interleaved

TENSORS = {
    "q.weight": "wq: (heads head_dim) embed_dim",
    "k.weight": "wk: (kv_heads head_dim) embed_dim",
    "v.weight": "wv: (kv_heads head_dim) embed_dim",
    "o.weight": "wo: embed_dim (heads head_dim)",
    "q.bias": "bq: (heads head_dim)",
}
PAIRED = Layout(
    name="paired",
    tensors=TENSORS,
    source="here",
    function=AttentionSpec(rotary=RotaryRule()),
    rows="interleaved",
)
HALVED = Layout(
    name="halved", tensors=TENSORS, source="here", function=AttentionSpec(rotary=RotaryRule())
)


def rotated(x: Tensor, *, pairing: str, width: int, place: float) -> Tensor:
    """The last axis turned by the definition, pair by pair."""
    turned = x.clone()
    for i in range(width // 2):
        a, b = (2 * i, 2 * i + 1) if pairing == "interleaved" else (i, i + width // 2)
        angle = torch.tensor(place / 100 ** (i / width), dtype=x.dtype)
        turned[..., a] = x[..., a] * angle.cos() - x[..., b] * angle.sin()
        turned[..., b] = x[..., b] * angle.cos() + x[..., a] * angle.sin()
    return turned


def test_by_hand() -> None:
    wq = torch.arange(10.0).view(1, 10, 1)
    order = to_half_split({"wq": wq}, width=10)["wq"].flatten().tolist()
    assert order == [0, 2, 4, 6, 8, 1, 3, 5, 7, 9]
    partly = to_half_split({"wq": wq}, width=6)["wq"].flatten().tolist()
    assert partly == [0, 2, 4, 1, 3, 5, 6, 7, 8, 9]


@given(width=st.integers(1, 5).map(lambda n: 2 * n), name=st.sampled_from(sorted(AXES)))
def test_the_two_undo_each_other_and_leave_what_is_not_rotated(width: int, name: str) -> None:
    sizes = dict(zip(AXES[name], (6, 10, 40), strict=False)) | {"head_dim": 10, "key_dim": 10}
    x = torch.randn([sizes[axis] for axis in AXES[name]])
    there = to_half_split({name: x}, width=width)
    assert torch.equal(to_interleaved(there, width=width)[name], x)
    moves = name in ROTATED and width > 2
    assert torch.equal(there[name], x) != moves


def test_what_has_an_order_is_what_scores_are_made_of() -> None:
    with_order = {name for name, axes in AXES.items() if {"head_dim", "key_dim"} & {*axes}}
    assert {*ROTATED} == with_order
    assert {name for name, axes in AXES.items() if "shared_width" in axes} == {"wr", "br"}


@pytest.mark.parametrize("width", [6, 10])
def test_scores_after_the_rotation_stay_what_they_were(width: int) -> None:
    """The reason for the order: interleaved rows, moved, score the same under the other pairing."""
    generator = torch.Generator().manual_seed(0)
    wq, wk = torch.randn(2, 6, 10, 40, generator=generator, dtype=torch.float64)
    x, y = torch.randn(2, 40, generator=generator, dtype=torch.float64)

    def scores(wq: Tensor, wk: Tensor, pairing: str) -> Tensor:
        q = rotated(wq @ x, pairing=pairing, width=width, place=7)
        k = rotated(wk @ y, pairing=pairing, width=width, place=3)
        return (q * k).sum(-1)

    moved = to_half_split({"wq": wq, "wk": wk}, width=width)
    before = scores(wq, wk, "interleaved")
    torch.testing.assert_close(scores(moved["wq"], moved["wk"], "half-split"), before)
    assert not torch.allclose(scores(wq, wk, "half-split"), before, rtol=0.01)


def stored() -> dict[str, Tensor]:
    shapes = [(60, 40), (20, 40), (20, 40), (40, 60), (60,)]
    return {name: torch.randn(shape) for name, shape in zip(TENSORS, shapes, strict=True)}


def test_a_layout_moves_queries_keys_and_their_biases_and_no_values() -> None:
    state = stored()
    straight, moved = (one.unpack(state, heads=6) for one in (HALVED, PAIRED))
    same = {name for name in straight if torch.equal(straight[name], moved[name])}
    assert same == {"wv", "wo"}
    order = [0, 2, 4, 6, 8, 1, 3, 5, 7, 9]
    assert torch.equal(moved["bq"], straight["bq"][:, order])
    partly = PAIRED.unpack(state, heads=6, rotary_width=6)
    assert torch.equal(partly["wk"], straight["wk"][:, [0, 2, 4, 1, 3, 5, 6, 7, 8, 9]])
    back = PAIRED.pack(partly, rotary_width=6)
    assert all(torch.equal(back[name], x) for name, x in state.items())


@pytest.mark.parametrize("width", [7, 12])
def test_a_width_that_is_no_pairs_or_too_wide_is_refused(width: int) -> None:
    with pytest.raises(ShapeError, match=f"a rotary_width of {width} in a head_dim of 10"):
        PAIRED.unpack(stored(), heads=6, rotary_width=width)
    HALVED.unpack(stored(), heads=6, rotary_width=width)  # whose rows stay where they are


def test_an_odd_head_cannot_be_interleaved() -> None:
    with pytest.raises(ShapeError, match="a rotary_width of 5 in a head_dim of 5"):
        PAIRED.unpack(stored(), heads=12, kv_heads=4)
