"""Names of tensors in the field: each is found in its layout, or what is missing is said."""

import pytest
import torch

import headwise
from headwise.errors import OptionError, UndecidedError
from headwise.function.weights import State
from headwise.layers.attention import Attention
from headwise.layouts.registry import layout, layouts_by_name
from tests.layouts.examples import example, known_of, width_of

BIASED = ("weight", "bias")


def layers(place: str, shapes: dict[str, tuple[int, ...]]) -> State:
    """Two layers with these tensors; ``place`` has {} for their number."""
    return {
        place.format(number) + name: torch.randn(shape)
        for number in range(2)
        for name, shape in shapes.items()
    }


def squares(
    names: str, ends: tuple[str, ...] = BIASED, *, mark: str = "."
) -> dict[str, tuple[int, ...]]:
    """Square matrices with their biases, by the ends of their names."""
    return {
        f"{name}{mark}{end}": (48,) if end in ("bias", "b") else (48, 48)
        for name in names.split()
        for end in ends
    }


HEAD_NORMS = {f"{letter}_norm.{end}": (12,) for letter in "qk" for end in BIASED}
FUSED = {"qkv.weight": (144, 48), "proj.weight": (48, 48), "proj.bias": (48,)}
EVA = {"q_bias": (48,), "v_bias": (48,)}
SCALED = {"logit_scale": (4, 1, 1), "cpb_mlp.0.weight": (512, 2), "cpb_mlp.2.weight": (4, 512)}
NORM = {"output.LayerNorm.weight": (48,), "output.LayerNorm.bias": (48,)}
GLOBAL = squares("self.query_global self.key_global self.value_global")
BERT = squares("self.query self.key self.value output.dense")
THREE = {f"{n}/kernel": (48, 4, 12) for n in ("query", "key", "value")} | {
    "out/kernel": (4, 12, 48)
}
FOUND = {
    "metaseq": layers(
        "decoder.layers.{}.self_attn.",
        {"qkv_proj.weight": (144, 48), "qkv_proj.bias": (144,), **squares("out_proj")},
    ),
    "vit-pytorch": layers(
        "transformer.layers.{}.0.",
        {"norm.weight": (48,), "to_qkv.weight": (192, 48), "to_out.0.weight": (48, 64)},
    ),
    "vit-pytorch-simple": layers(
        "transformer.layers.{}.0.fn.", {"to_qkv.weight": (192, 48), "to_out.weight": (48, 64)}
    ),
    "gemma-jax": layers(
        "transformer/layer_{}/attn/",
        {
            "q_einsum/w": (4, 48, 16),
            "kv_einsum/w": (2, 2, 48, 16),
            "attn_vec_einsum/w": (4, 16, 48),
        },
    ),
    "bert-tensorflow": layers(
        "bert/encoder/layer_{}/attention/",
        squares("self/query self/key self/value output/dense", ("kernel", "bias"), mark="/")
        | {"output/LayerNorm/gamma": (48,), "output/LayerNorm/beta": (48,)},
    ),
    "gpt2-tensorflow": layers(
        "model/h{}/attn/",
        {
            "c_attn/w": (1, 48, 144),
            "c_attn/b": (144,),
            "c_proj/w": (1, 48, 48),
            "c_proj/b": (48,),
        },
    ),
    "tensorrt-llm": layers(
        "transformer.layers.{}.attention.", {"qkv.weight": (128, 48), "dense.weight": (48, 64)}
    ),
    "flux": layers(
        "double_blocks.{}.img_attn.",
        FUSED | {f"norm.{name}_norm.scale": (12,) for name in ("query", "key")},
    ),
    "mingpt": layers("blocks.{}.attn.", squares("key query value proj") | {"mask": (1, 1, 9, 9)}),
    "swinv2-microsoft": layers("layers.0.blocks.{}.attn.", FUSED | EVA | SCALED),
    "eva-clip": layers(
        "visual.blocks.{}.attn.",
        squares("q_proj k_proj v_proj", ("weight",))
        | squares("proj inner_attn_ln")
        | EVA
        | {"inner_attn_ln.weight": (48,), "rope.freqs_cos": (9, 12), "rope.freqs_sin": (9, 12)},
    ),
    "easylm": layers(
        "params/transformer/h/{}/attention/", squares("wq wk wv wo", ("kernel",), mark="/")
    ),
    "esm-meta": layers(
        "encoder.sentence_encoder.layers.{}.self_attn.",
        squares("q_proj k_proj v_proj out_proj") | {"rot_emb.inv_freq": (6,)},
    ),
    "flax": layers("params/Transformer/encoderblock_{}/MultiHeadDotProductAttention_0/", THREE),
    "longformer": layers("longformer.encoder.layer.{}.attention.", BERT | GLOBAL | NORM),
    "qwen3-next": layers(
        "model.layers.{}.self_attn.",
        {
            "q_proj.weight": (128, 48),
            "k_proj.weight": (32, 48),
            "v_proj.weight": (32, 48),
            "o_proj.weight": (48, 64),
            "q_norm.weight": (16,),
            "k_norm.weight": (16,),
        },
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_layout_is_found(name: str) -> None:
    found = headwise.detect(FOUND[name])
    assert found.require_only_layout().name == name
    assert len(found.candidates[0][0].modules) == 2


def test_a_timm_vit_with_norms_is_one_of_three() -> None:
    """The engine's layers have these names at any place."""
    found = headwise.detect(layers("blocks.{}.attn.", FUSED | HEAD_NORMS))
    assert {one.layout.name for group in found.candidates for one in group} == {
        "transformer-engine",
        "transformer-engine-stacked",
        "vit-timm",
    }


FORMS = {
    "swinv2": "l2 over head, with a learned scale for each head",
    "swinv2-microsoft": "an MLP of the place in the window",
    "eva-clip": "by row and column",
    "flux": "by row and column",
    "longformer": "both sides, and global tokens",
}


@pytest.mark.parametrize("name", FORMS)
def test_a_form_without_arithmetic_is_named_and_refused(name: str) -> None:
    described = layout(name)
    assert FORMS[name] in described.settings().values()
    state = described.pack(example(described))
    with pytest.raises(OptionError, match=FORMS[name]):
        Attention.from_layout(state, layout=name, num_heads=known_of(described)["heads"])


TREES = sorted(
    name
    for name, one in layouts_by_name().items()
    if one.where and any("kernel" in n or "einsum" in n for n in one.tensors)
)


@pytest.mark.parametrize("name", TREES)
def test_a_tree_is_read_with_dots_and_with_slashes(name: str) -> None:
    one = layout(name)
    place = next(iter(one.where.values())).format(layer=1)
    canonical = example(one)
    file = {place + local: x for local, x in one.pack(canonical, **width_of(one)).items()}
    other = ("/", ".") if "/" in place else (".", "/")
    swapped = {full.replace(*other): x for full, x in file.items()}
    assert swapped.keys().isdisjoint(file)
    moved = headwise.convert(swapped, one, one, **known_of(one))
    assert moved.keys() == {full.replace(*other) if full not in file else full for full in file}
    assert all(torch.equal(moved[full], x) for full, x in file.items())


@pytest.mark.parametrize("axis", [0, 1])
def test_stacked_layers_are_no_layout_and_the_reason_is_said(axis: int) -> None:
    file = {
        f"params/encoder/layers/{n}": torch.randn((*shape[:axis], 3, *shape[axis:]))
        for n, shape in THREE.items()
    }
    found = headwise.detect(file)
    assert found.candidates == ()
    said = r"names are those of flax, and each tensor has one axis more, for stacked layers"
    with pytest.raises(UndecidedError, match=said) as refusal:
        found.require_only_layout()
    assert str(tuple(file["params/encoder/layers/query/kernel"].shape)) in str(refusal.value)
    one = {n: x.select(axis, 1) for n, x in file.items()}
    assert headwise.detect(one).candidates[0][0].layout.name == "flax"


MARKED = [name for name, one in layouts_by_name().items() if one.marks]


@pytest.mark.parametrize("name", MARKED)
def test_a_layout_is_not_offered_for_files_without_its_marks(name: str) -> None:
    one = layout(name)
    place = next(iter(one.where.values())).format(layer=1, stage=0)
    file = {place + local: x for local, x in one.pack(example(one)).items()}
    marks = {place + local: torch.ones(1) for local in one.marks}
    for tensors, is_offered in ((file, False), (file | marks, True)):
        found = headwise.detect(tensors, heads=known_of(one)["heads"])
        names = {each.layout.name for group in found.candidates for each in group}
        assert (name in names) is is_offered
