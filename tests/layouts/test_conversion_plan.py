"""Plans, made from names and shapes alone: which tensors become which, and what is refused."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from headwise.errors import DTypeError, OptionError, ShapeError
from headwise.function.spec import FROM_CONFIG, AttentionSpec, RotaryRule, Softcap
from headwise.layouts._layout import Layout
from headwise.layouts.modules import NameForm
from headwise.layouts.plan import plan_conversion

ROPE = AttentionSpec(rotary=RotaryRule())
APART = Layout(
    name="apart",
    tensors={
        "q.weight": "wq: (heads head_dim) embed_dim",
        "k.weight": "wk: (kv_heads head_dim) embed_dim",
        "v.weight": "wv: (kv_heads value_dim) embed_dim",
        "o.weight": "wo: out_dim (heads value_dim)",
        "q.bias": "bq: (heads head_dim)",
        "k.bias": "bk: (kv_heads head_dim)",
        "v.bias": "bv: (kv_heads value_dim)",
        "sink": "sink: heads",
    },
    where={"self": "model.layers.{layer}.attn."},
    outside={"model.emb.weight": "emb: vocabulary embed_dim", "head.weight": "head: vocabulary x"},
    beside=("*.inv_freq", "mask"),
    optional=("sink",),
    function=ROPE,
    source="here",
)
FUSED = Layout(
    name="fused",
    tensors={
        "qkv.weight": "([wq: heads head_dim | wk: heads head_dim | wv: heads head_dim]) embed_dim",
        "qkv.bias": "([bq: heads head_dim | bk: heads head_dim | bv: heads head_dim])",
        "o.weight": "wo: (heads head_dim) out_dim",
    },
    where={"self": "h.{layer}."},
    outside={"wte": "emb: vocabulary embed_dim", "unembed": "head: x vocabulary"},
    function=ROPE,
    source="here",
)


@dataclass(frozen=True)
class Header:
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


def model(
    *, heads: int = 6, kv_heads: int = 6, value_dim: int = 10, layers: int = 2, root: str = ""
) -> dict[str, Header]:
    """The names and shapes of a model in APART."""
    shapes = {
        "q.weight": (heads * 10, 40),
        "k.weight": (kv_heads * 10, 40),
        "v.weight": (kv_heads * value_dim, 40),
        "o.weight": (40, heads * value_dim),
    }
    found = {f"{root}model.emb.weight": Header((50, 40)), f"{root}head.weight": Header((50, 40))}
    for layer in range(layers):
        for name, shape in shapes.items():
            found[f"{root}model.layers.{layer}.attn.{name}"] = Header(shape)
        found[f"{root}model.layers.{layer}.mlp.weight"] = Header((80, 40))
    return found


def made(headers: Mapping[str, Header], source: Layout, target: Layout, **known: int) -> object:
    return {
        step.inputs: dict(step.outputs)
        for step in plan_conversion(headers, source, target, **known)
    }


def test_what_becomes_what() -> None:
    headers = model(layers=1)
    headers["model.layers.0.attn.rotary.inv_freq"] = Header((5,))
    attn = "model.layers.0.attn."
    assert made(headers, APART, FUSED, heads=6) == {
        (f"{attn}q.weight", f"{attn}k.weight", f"{attn}v.weight"): {"h.0.qkv.weight": (180, 40)},
        (f"{attn}o.weight",): {"h.0.o.weight": (60, 40)},
        ("model.emb.weight",): {"wte": (50, 40)},
        ("head.weight",): {"unembed": (40, 50)},
        ("model.layers.0.mlp.weight",): {"model.layers.0.mlp.weight": (80, 40)},
        (f"{attn}rotary.inv_freq",): {f"{attn}rotary.inv_freq": (5,)},
    }
    copies = [
        step.inputs for step in plan_conversion(headers, APART, FUSED, heads=6) if step.is_copy
    ]
    assert ("model.emb.weight",) in copies
    assert ("head.weight",) not in copies


def test_the_way_back_has_the_same_tensors() -> None:
    headers = model()
    there = plan_conversion(headers, APART, FUSED, heads=6)
    stored = {name: Header(shape) for step in there for name, shape in step.outputs.items()}
    # What the other does not know has kept its name.
    assert "model.layers.1.mlp.weight" in stored
    back = {
        n: s
        for step in plan_conversion(stored, FUSED, APART, heads=6)
        for n, s in step.outputs.items()
    }
    assert back == {name: header.shape for name, header in headers.items()}


def test_a_root_is_kept() -> None:
    headers = model(root="text.", layers=1)
    outputs = {n for step in plan_conversion(headers, APART, FUSED, heads=6) for n in step.outputs}
    assert {"text.h.0.qkv.weight", "text.wte"} <= outputs


def test_steps_are_as_small_as_the_layouts_allow() -> None:
    headers = model(layers=1)
    steps = plan_conversion(headers, APART, APART, heads=6)
    assert all(len(step.inputs) == 1 == len(step.outputs) for step in steps)


def test_every_tensor_is_in_one_step() -> None:
    headers = model(layers=3)
    inputs = [
        name for step in plan_conversion(headers, APART, FUSED, heads=6) for name in step.inputs
    ]
    assert sorted(inputs) == sorted(headers)


def test_a_module_alone_or_of_another_model_keeps_its_prefix() -> None:
    shapes = {
        "q.weight": (60, 40),
        "k.weight": (60, 40),
        "v.weight": (60, 40),
        "o.weight": (44, 60),
    }
    for prefix in ("", "some.block.7."):
        headers = {prefix + name: Header(shape) for name, shape in shapes.items()}
        outputs = {
            n for step in plan_conversion(headers, APART, FUSED, heads=6) for n in step.outputs
        }
        assert outputs == {f"{prefix}qkv.weight", f"{prefix}o.weight"}


def test_a_bias_that_must_be_zero_is_looked_at_first() -> None:
    headers = model(layers=2)
    for layer in (0, 1):
        headers[f"model.layers.{layer}.attn.q.bias"] = Header((60,))
    without = replace(
        FUSED,
        name="without-biases",
        tensors={name: text for name, text in FUSED.tensors.items() if name != "qkv.bias"},
    )
    steps = plan_conversion(headers, APART, without, heads=6)
    assert [step.inputs for step in steps if not step.outputs] == [
        (f"model.layers.{layer}.attn.q.bias",) for layer in (0, 1)
    ]
    assert [bool(step.outputs) for step in steps] == sorted(bool(step.outputs) for step in steps)


def test_heads_that_the_target_cannot_hold_are_refused_before_anything_is_read() -> None:
    with pytest.raises(ShapeError, match=r"wk of shape \(2, 10, 40\)\n  needed: \(6, 10, 40\)"):
        plan_conversion(model(kv_heads=2), APART, FUSED, heads=6)
    with pytest.raises(ShapeError, match=r"wv of shape \(6, 7, 40\)\n  needed: \(6, 10, 40\)"):
        plan_conversion(model(value_dim=7), APART, FUSED, heads=6)


def test_a_tensor_without_a_place_is_refused_before_anything_is_read() -> None:
    headers = model(layers=1) | {"model.layers.0.attn.sink": Header((6,))}
    with pytest.raises(OptionError, match="sink, which fused has no tensor for"):
        plan_conversion(headers, APART, FUSED, heads=6)


def test_a_source_of_nothing_is_refused() -> None:
    with pytest.raises(OptionError, match=r"1 tensors, among them \['conv.weight'\]"):
        plan_conversion({"conv.weight": Header((3, 3))}, APART, FUSED, heads=6)


def test_a_module_that_is_not_whole_is_refused() -> None:
    headers = model(layers=1)
    del headers["model.layers.0.attn.v.weight"]
    with pytest.raises(OptionError, match=r"missing are model.layers.0.attn.v.weight"):
        plan_conversion(headers, APART, FUSED, heads=6)


def test_a_stranger_in_a_module_is_refused() -> None:
    headers = model(layers=1) | {"model.layers.0.attn.q.lora_A": Header((8, 40))}
    with pytest.raises(OptionError, match=r"model.layers.0.attn.q.lora_A, within") as refused:
        plan_conversion(headers, APART, FUSED, heads=6)
    assert "adapters" in refused.value.do


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(dtype: torch.dtype) -> None:
    headers = model(layers=1) | {"model.layers.0.attn.q.weight": Header((60, 40), dtype)}
    with pytest.raises(DTypeError, match=rf"q.weight in {dtype}"):
        plan_conversion(headers, APART, FUSED, heads=6)


def test_dtypes_that_would_share_a_tensor_are_refused_before_anything_is_read() -> None:
    headers = model(layers=1)
    headers["model.layers.0.attn.q.weight"] = Header((60, 40), torch.float16)
    with pytest.raises(DTypeError, match=r"wq in torch.float16, wk in torch.float32"):
        plan_conversion(headers, APART, FUSED, heads=6)
    assert plan_conversion(headers, APART, APART, heads=6)


def test_two_tensors_of_one_name_are_refused() -> None:
    headers = model(layers=1) | {"wte": Header((3, 3))}
    with pytest.raises(OptionError, match=r"wte, made of model.emb.weight and of wte"):
        plan_conversion(headers, APART, FUSED, heads=6)


def test_counts_that_are_none_of_the_layouts_are_refused() -> None:
    with pytest.raises(OptionError, match="a count of head"):
        plan_conversion(model(), APART, FUSED, heads=6, head=6)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (AttentionSpec(rotary=RotaryRule(), scale=1.0), "scale: 1/sqrt\\(head_dim\\) against 1"),
        (AttentionSpec(), "rotary: half-split against none"),
        (AttentionSpec(rotary=RotaryRule(), softcap=Softcap()), "softcap: none against tanh"),
    ],
)
def test_another_function_is_refused_unless_it_is_accepted(
    function: AttentionSpec, name: str
) -> None:
    other = replace(FUSED, name="other", function=function)
    with pytest.raises(OptionError, match=name) as refused:
        plan_conversion(model(), APART, other, heads=6)
    assert plan_conversion(model(), APART, other, heads=6, accept=refused.value.parameter["accept"])


def test_what_is_accepted_is_a_field() -> None:
    with pytest.raises(OptionError, match="accept scales"):
        plan_conversion(model(), APART, FUSED, heads=6, accept=["scales"])


def test_the_config_may_decide_and_pairings_are_no_conflict() -> None:
    for function in (
        AttentionSpec(rotary=RotaryRule(pairing="interleaved")),
        AttentionSpec(rotary=FROM_CONFIG, scale=FROM_CONFIG),
    ):
        assert ROPE.conflicts(function) == {}


def test_a_role_that_the_target_has_no_place_for_is_refused() -> None:
    cross = replace(APART, name="cross", where={"cross": "model.layers.{layer}.attn."})
    headers = {n: h for n, h in model().items() if "attn" in n}
    with pytest.raises(OptionError, match=r"attn., which is cross attention") as refused:
        plan_conversion(headers, cross, FUSED, heads=6)
    assert "which has self" in refused.value.needed


def test_one_name_to_accept_may_stand_alone() -> None:
    other = replace(FUSED, name="other", function=AttentionSpec(rotary=RotaryRule(), scale=1.0))
    assert plan_conversion(model(), APART, other, heads=6, accept="scale")


def test_a_layer_in_names_that_are_not_known_is_not_left_behind() -> None:
    """Such as one that is quantised, or in another layout."""
    headers = {n: h for n, h in model().items() if "layers.1" not in n}
    headers["model.layers.1.attn.q.qweight"] = Header((5, 60), torch.int32)
    with pytest.raises(OptionError, match=r"layers.1.attn.q.qweight, within model.layers.1.attn."):
        plan_conversion(headers, APART, FUSED, heads=6)


def test_heads_of_two_towers_are_not_taken_for_one_another() -> None:
    headers = {n: h for n, h in model().items() if "attn" in n}
    wider = {f"tower.{n}": Header(tuple(2 * x for x in h.shape)) for n, h in headers.items()}
    with pytest.raises(ShapeError, match=r"heads 6, which gives a head_dim of 10 in .*, 20 in"):
        plan_conversion(headers | wider, APART, FUSED, heads=6)
    assert plan_conversion(headers | wider, APART, FUSED, head_dim=10)


def test_scales_stay_with_their_matrix() -> None:
    """A matrix that something unknown belongs to keeps its name, beside it."""
    scaled = model() | {"model.emb.weight_scale": Header((1,))}
    names = {
        name for step in plan_conversion(scaled, APART, FUSED, heads=6) for name in step.outputs
    }
    assert {"model.emb.weight", "model.emb.weight_scale"} <= names
    assert "wte" not in names


def test_a_bias_stays_with_a_matrix_that_is_quantised() -> None:
    linear = {"up.{layer}.weight": "up: hidden_dim embed_dim", "up.{layer}.bias": "b: hidden_dim"}
    renamed = {name.replace("up", "h"): text for name, text in linear.items()}
    source, target = replace(APART, outside=linear), replace(FUSED, outside=renamed)
    known = {"up.0.weight": Header((8, 40)), "up.0.bias": Header((8,))}
    headers = {n: h for n, h in model().items() if "attn" in n} | known
    names = {n for s in plan_conversion(headers, source, target, heads=6) for n in s.outputs}
    assert {"h.0.weight", "h.0.bias"} <= names
    headers["up.0.weight_scale"] = Header((1,))
    names = {n for s in plan_conversion(headers, source, target, heads=6) for n in s.outputs}
    assert {"up.0.weight", "up.0.bias", "up.0.weight_scale"} <= names


def test_another_root_is_that_of_all_names() -> None:
    headers = model(root="old.") | {"old.mask": Header((1,)), "apart": Header((2,))}
    names = {
        n
        for s in plan_conversion(headers, APART, FUSED, heads=6, form=NameForm(root="new."))
        for n in s.outputs
    }
    assert {"new.mask", "new.wte", "apart"} <= names
    assert not any(name.startswith("old.") for name in names)


def output_names(headers: Mapping[str, Header], target: Layout, **options: Any) -> set[str]:
    return {
        n for s in plan_conversion(headers, APART, target, heads=6, **options) for n in s.outputs
    }


def test_a_layout_may_state_that_its_names_have_no_root() -> None:
    bare, headers = replace(FUSED, root=""), model(root="old.") | {"old.mask": Header((1,))}
    assert output_names(headers, bare) == output_names(headers, FUSED, form=NameForm(root=""))
    assert {"h.0.qkv.weight", "h.1.o.weight", "wte", "mask"} <= output_names(headers, bare)
    assert "x.h.0.qkv.weight" in output_names(headers, bare, form=NameForm(root="x."))
    both = model(root="a.", layers=1) | model(root="b.", layers=1)  # two models in one file
    assert output_names(both, bare) == output_names(both, FUSED)
    apart = headers | {f"new.{n}": h for n, h in model(layers=1).items() if "attn" in n}
    apart = {n.replace("new.model.layers.0", "new"): h for n, h in apart.items()}
    assert output_names(apart, bare) == output_names(apart, FUSED)


def test_the_root_of_a_module_anywhere_is_all_that_stands_before_it() -> None:
    headers = {n.removeprefix("model.layers.0."): h for n, h in model(layers=1).items()}
    headers = {n: h for n, h in headers.items() if n.startswith("attn.")}
    names = {
        n
        for s in plan_conversion(headers, APART, FUSED, heads=6, form=NameForm(root="x."))
        for n in s.outputs
    }
    assert names == {"x.qkv.weight", "x.o.weight"}


def test_a_layout_of_one_layer_holds_no_model() -> None:
    with pytest.raises(OptionError, match=r"model.layers.0.attn., one of the modules") as refused:
        plan_conversion(model(), APART, replace(FUSED, where={}), heads=6)
    assert "fused is that of one layer" in refused.value.needed


def test_numbers_that_the_source_does_not_have_are_refused() -> None:
    staged = replace(FUSED, where={"self": "stages.{stage}.blocks.{block}."})
    with pytest.raises(OptionError, match=r"which is self attention"):
        plan_conversion(model(), APART, staged, heads=6)
