"""Conversions: closed forms, every bit kept, and what is not lossless refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headwise.errors import OptionError, ShapeError
from headwise.function.spec import AttentionSpec, RotaryRule
from headwise.layouts._layout import Layout
from headwise.layouts.plan import RoundTripError, convert
from headwise.layouts.registry import layout
from headwise.support.tensors import same_bytes
from tests.layouts.examples import example
from tests.layouts.test_conversion_plan import APART, FUSED

BY_HEAD = Layout(
    name="by-head",
    tensors={
        "qkv.weight": "(heads [wq: head_dim | wk: head_dim | wv: head_dim]) embed_dim",
        "qkv.bias": "(heads [bq: head_dim | bk: head_dim | bv: head_dim])",
        "o.weight": "wo: out_dim (heads head_dim)",
    },
    where={"self": "layers.{layer}."},
    function=AttentionSpec(rotary=RotaryRule()),
    source="here",
)
WITHOUT_K = replace(
    APART,
    name="without-k",
    tensors={name: text for name, text in APART.tensors.items() if name != "k.bias"},
)


def weights(*, biases: bool = True, kv_heads: int = 6, seed: int = 0) -> dict[str, Tensor]:
    """A module of APART."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "q.weight": (60, 40),
        "k.weight": (10 * kv_heads, 40),
        "v.weight": (10 * kv_heads, 40),
        "o.weight": (44, 60),
    }
    if biases:
        shapes |= {"q.bias": (60,), "k.bias": (10 * kv_heads,), "v.bias": (10 * kv_heads,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    assert [name for name in want if not same_bytes(got[name], want[name])] == []


def test_side_by_side_and_head_by_head_by_hand() -> None:
    state = weights()
    q, k, v = (state[f"{name}.weight"] for name in "qkv")
    fused = convert(state, APART, FUSED, heads=6)
    assert torch.equal(fused["qkv.weight"], torch.cat([q, k, v]))
    assert torch.equal(fused["o.weight"], state["o.weight"].T)
    by_head = convert(fused, FUSED, BY_HEAD, heads=6)
    rows = [x[10 * head : 10 * head + 10] for head in range(6) for x in (q, k, v)]
    assert torch.equal(by_head["qkv.weight"], torch.cat(rows))
    assert_same(convert(by_head, BY_HEAD, APART, heads=6), state)


def test_interleaved_rows_are_moved() -> None:
    paired = replace(APART, name="paired", rows="interleaved")
    state = weights(biases=False, kv_heads=2)
    moved = convert(state, paired, APART, heads=6)
    order = [0, 2, 4, 6, 8, 1, 3, 5, 7, 9]
    assert torch.equal(
        moved["k.weight"].view(2, 10, 40), state["k.weight"].view(2, 10, 40)[:, order]
    )
    assert torch.equal(moved["v.weight"], state["v.weight"])
    part = convert(state, paired, APART, heads=6, rotary_width=4)
    order = [0, 2, 1, 3, 4, 5, 6, 7, 8, 9]
    assert torch.equal(
        part["q.weight"].view(6, 10, 40), state["q.weight"].view(6, 10, 40)[:, order]
    )
    assert_same(convert(part, APART, paired, heads=6, rotary_width=4), state)


def test_a_bias_that_is_fused_with_none_is_zero_and_goes_again() -> None:
    state = weights()
    del state["k.bias"]
    fused = convert(state, WITHOUT_K, FUSED, heads=6)
    assert torch.equal(fused["qkv.bias"].view(3, 60)[1], torch.zeros(60))
    assert_same(convert(fused, FUSED, WITHOUT_K, heads=6), state)


@pytest.mark.parametrize("entry", [-0.0, 1e-45, float("nan")])
def test_a_bias_is_left_out_only_if_every_bit_is_zero(entry: float) -> None:
    state = weights()
    state["k.bias"] = torch.zeros(60)
    state["k.bias"][7] = entry
    with pytest.raises(OptionError, match="bk, which without-k has no tensor for"):
        convert(state, APART, WITHOUT_K, heads=6)
    fused = convert(state, APART, FUSED, heads=6)
    with pytest.raises(OptionError, match="bk, which without-k has no tensor for"):
        convert(fused, FUSED, WITHOUT_K, heads=6)


def test_all_biases_of_a_tensor_may_be_left_out() -> None:
    state = weights() | {"q.bias": torch.zeros(60)}
    target = replace(
        WITHOUT_K, tensors={n: text for n, text in WITHOUT_K.tensors.items() if n != "q.bias"}
    )
    converted = convert(state | {"k.bias": torch.zeros(60)}, APART, target, heads=6)
    assert converted.keys() == {"q.weight", "k.weight", "v.weight", "o.weight", "v.bias"}


@pytest.mark.slow
@given(
    bits=st.lists(st.integers(0, 2**16 - 1), min_size=8, max_size=8),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_every_bit_pattern_survives(bits: list[int], dtype: torch.dtype) -> None:
    """Negative zeros, infinities, NaNs with a payload, and what else 16 bits can say."""
    entries = torch.tensor(bits, dtype=torch.uint16).view(dtype)
    state = {name: x.to(dtype) for name, x in weights().items()}
    for x in state.values():
        x.flatten()[:8] = entries
    fused = convert(state, APART, FUSED, heads=6)
    assert_same(convert(fused, FUSED, APART, heads=6), state)


def test_what_comes_out_shares_no_memory_with_what_went_in() -> None:
    state = weights()
    state["k.weight"] = state["q.weight"]  # tied
    for target in (APART, FUSED):
        made = convert(state, APART, target, heads=6)
        pointers = {x.untyped_storage().data_ptr() for x in state.values()}
        assert pointers.isdisjoint(x.untyped_storage().data_ptr() for x in made.values())


def test_the_source_is_left_as_it_was() -> None:
    state = weights()
    before = {name: x.clone() for name, x in state.items()}
    convert(state, APART, FUSED, heads=6)
    assert_same(state, before)


def test_what_is_not_attention_passes_through() -> None:
    block = {f"model.layers.3.attn.{name}": x for name, x in weights().items()}
    norm = torch.randn(40)
    made = convert(block | {"model.layers.3.norm": norm}, APART, BY_HEAD, heads=6)
    passed = made["model.layers.3.norm"]
    assert same_bytes(passed, norm)
    assert passed.data_ptr() != norm.data_ptr()
    assert made["layers.3.qkv.weight"].shape == (180, 40)


def test_a_way_back_that_does_not_lead_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(pattern: object, *_: object) -> Tensor:
        return true_pack(pattern, *_).roll(1, 0)  # type: ignore[arg-type]

    from headwise.layouts import pattern as notation

    true_pack = notation.pack_tensors
    monkeypatch.setattr(notation, "pack_tensors", careless)
    with pytest.raises(RoundTripError, match="which does not come back"):
        convert(weights(), APART, FUSED, heads=6)


def test_unpack_refuses_what_contradicts_itself() -> None:
    state = convert(weights(), APART, FUSED, heads=6)
    with pytest.raises(ShapeError, match="kv_heads 2\n  needed: kv_heads 6: so fused stores wk"):
        FUSED.unpack(state, heads=6, kv_heads=2)
    assert FUSED.unpack(state, heads=6, kv_heads=6)["wk"].shape == (6, 10, 40)
    with pytest.raises(OptionError, match="a count of heds"):
        FUSED.unpack(state, heds=6)
    with pytest.raises(ShapeError, match="an axis of 180, with heads 7"):
        FUSED.unpack(state, heads=7)
    with pytest.raises(OptionError, match=r"unknown are x, missing are o.weight"):
        FUSED.unpack({"qkv.weight": state["qkv.weight"], "x": state["o.weight"]}, heads=6)


def test_pack_refuses_what_is_not_whole() -> None:
    canonical = APART.unpack(weights(biases=False), heads=6)
    del canonical["wk"]
    with pytest.raises(OptionError, match=r"missing are k.weight"):
        APART.pack(canonical)
    with pytest.raises(OptionError, match="no wk"):
        FUSED.pack(canonical)


@pytest.mark.parametrize(
    ("tensors", "saw"),
    [
        ({"q": "wQ: (heads head_dim) embed_dim"}, "wQ in q of mistaken"),
        ({"q": "wq: (heads head_dim) width"}, "wq with the axes heads head_dim width"),
        (
            {
                "a": "wq: (heads head_dim) embed_dim",
                "b": "embed_dim ([wq: heads head_dim | wk: heads head_dim])",
            },
            "wq in b of mistaken, and in a",
        ),
    ],
)
def test_a_layout_that_could_not_be_read_is_refused_when_it_is_written(
    tensors: dict[str, str], saw: str
) -> None:
    with pytest.raises(OptionError) as refused:
        Layout(name="mistaken", tensors=tensors, source="here")
    assert saw in refused.value.saw


def test_same_bytes() -> None:
    x = torch.tensor([0.0, float("nan")])
    assert same_bytes(x, x.clone())
    assert not same_bytes(x, torch.tensor([-0.0, float("nan")]))
    assert not same_bytes(x, x.double())
    assert not same_bytes(x, x[None])
    z = torch.tensor([1 + 2j, -0.0 + 1j], dtype=torch.complex128)
    assert same_bytes(z, z.conj().conj_physical())
    assert not same_bytes(z, z.conj())


@pytest.mark.parametrize(
    ("source", "target"), [("gptj", "phi"), ("neox", "gguf-llama"), ("gptj", "codegen")]
)
def test_heads_that_turn_in_part_need_the_number(source: str, target: str) -> None:
    """Moved whole, the channels that do not turn would change places, and no shape would tell."""
    one = layout(source)
    state = one.pack(
        {name: x for name, x in example(one).items() if not name.startswith("b")}, rotary_width=6
    )
    with pytest.raises(
        OptionError, match="whose heads may be rotated in part, and no rotary_width"
    ):
        convert(state, source, target, heads=12)


def test_channels_that_do_not_turn_stay() -> None:
    one = layout("gptj")
    state = one.pack(
        {name: x for name, x in example(one).items() if not name.startswith("b")}, rotary_width=6
    )
    made = convert(state, "gptj", "phi", heads=12, rotary_width=6)
    before, after = (
        x.unflatten(0, (12, 10)) for x in (state["q_proj.weight"], made["q_proj.weight"])
    )
    assert torch.equal(after[:, 6:], before[:, 6:])
    assert torch.equal(after[:, :6], before[:, [0, 2, 4, 1, 3, 5]])


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"tensors": {"qkv": BY_HEAD.tensors["qkv.weight"]}}, "by-head without wo"),
        ({"where": {"own": "h.{layer}."}}, "h.{layer}., the place of own attention in by-head"),
        ({"where": {"self": "h.{n}."}}, "h.{n}., the place of self attention in by-head"),
    ],
)
def test_a_layout_that_could_not_be_placed_is_refused(changes: dict[str, Any], seen: str) -> None:
    with pytest.raises(OptionError) as refused:
        replace(BY_HEAD, **changes)
    assert refused.value.saw == seen


@pytest.mark.parametrize(
    ("field", "said"),
    [("rotary", "interleaved"), ("scale", "1"), ("softcap", 50.0), ("qk_norm", "rms")],
)
def test_a_setting_of_another_type_is_refused(field: str, said: object) -> None:
    with pytest.raises(OptionError, match=f"{field}={said!r}"):
        AttentionSpec(**{field: said})


@pytest.mark.parametrize(
    ("field", "said"), [("rows", "neighbours"), ("mask", "true"), ("axes", "bld")]
)
def test_a_convention_in_unknown_words_is_refused(field: str, said: str) -> None:
    with pytest.raises(OptionError, match=f"{field}={said!r} of apart"):
        replace(APART, **{field: said})


@pytest.mark.parametrize(
    ("state", "heads", "saw"),
    [
        (None, 4, "weights of type NoneType"),
        ("a/path", 4, "weights of type str"),
        (torch.nn.MultiheadAttention(40, 4), 4, "weights of type MultiheadAttention"),
        ({"in_proj_weight": [[1.0]]}, 4, "the state dict with 'in_proj_weight', a list"),
        ({b"in_proj_weight": torch.ones(3)}, 4, "the state dict with b'in_proj_weight', a Tensor"),
        (torch.nn.MultiheadAttention(40, 4).state_dict(), 4.0, "heads=4.0"),
        (torch.nn.MultiheadAttention(40, 4).state_dict(), "4", "heads='4'"),
        (torch.nn.MultiheadAttention(40, 4).state_dict(), True, "heads=True"),
    ],
)
def test_what_is_no_state_dict_or_no_count(state: Any, heads: Any, saw: str) -> None:
    with pytest.raises(OptionError) as error:
        convert(state, "torch-packed", "gpt2", heads=heads)
    assert error.value.saw == saw


def test_what_is_no_name_of_a_layout() -> None:
    with pytest.raises(OptionError, match="no layout is named None"):
        convert({"a": torch.ones(3)}, None, "gpt2", heads=4)  # type: ignore[arg-type]
