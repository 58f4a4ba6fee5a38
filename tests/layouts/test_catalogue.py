"""What holds of every layout there is, and of every two that could be mixed up."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from itertools import combinations, permutations
from math import prod
from pathlib import Path

import pytest
import torch

from headwise.errors import OptionError, ShapeError
from headwise.function.spec import AttentionSpec
from headwise.function.weights import AXES, BIASES, State
from headwise.layouts._layout import Layout
from headwise.layouts.equality import list_differing_tensors
from headwise.layouts.pattern import Sizes
from headwise.layouts.plan import convert
from headwise.layouts.registry import catalogue_by_family
from headwise.layouts.registry import layout as by_name
from headwise.support.tensors import same_bytes
from tests.layouts.examples import (
    ROTARY_WIDTH,
    SIZES,
    example,
    known_of,
    sizes_of,
    tensors_of,
    width_of,
)

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ROLES = {"self", "encoder", "decoder", "cross"}
PUBLISHED = {one.name: one for family in catalogue_by_family().values() for one in family}

# Several names for one map and one function, and why there are several.
SYNONYMS: dict[frozenset[str], str] = {
    frozenset({"bart", "clip", "fairseq", "opt", "wav2vec2", "whisper"}): (
        "the same matrices; what stands around them, and which biases there are, differs"
    ),
    frozenset({"llama", "qwen2", "starcoder2"}): "the same matrices; their biases tell them apart",
    frozenset({"clip-openai", "torch-packed"}): "torch's layer at other places",
    frozenset({"beit", "vitdet"}): "the same without biases, which they name differently",
    frozenset({"qformer", "videomae"}): "the same matrices; their biases tell them apart",
    frozenset({"megatron", "megatron-gpt"}): "their MLPs differ",
    frozenset({"t5", "umt5"}): "the table of distances is in one layer, or in each",
    frozenset({"keras", "keras-gqa"}): "the same with as many kv heads as heads",
    frozenset({"falcon-40b", "falcon-7b"}): "the same with one kv head",
}


@pytest.fixture(params=sorted(PUBLISHED))
def layout(request: pytest.FixtureRequest) -> Layout:
    return PUBLISHED[request.param]


def test_every_bit_comes_back(layout: Layout) -> None:
    for dtype in DTYPES:
        canonical = example(layout, dtype=dtype)
        stored = layout.pack(canonical, **width_of(layout))
        again = layout.unpack(stored, **known_of(layout))
        assert again.keys() == canonical.keys()
        assert [name for name, x in canonical.items() if not same_bytes(again[name], x)] == []
        once_more = layout.pack(again, **width_of(layout))
        assert [name for name, x in stored.items() if not same_bytes(once_more[name], x)] == []
        assert all(x.is_contiguous() for x in stored.values())


def test_the_examples_have_what_is_easily_lost(layout: Layout) -> None:
    for x in example(layout, dtype=torch.float16).values():
        assert bool((x.signbit() & (x == 0)).any() or x.numel() == 1)
        assert bool(x.isinf().any())


def test_nothing_is_stored_twice_or_left_out(layout: Layout) -> None:
    """Every number of the canonical form stands in the stored tensors, once."""
    canonical = numbered(sizes_of(layout), tensors_of(layout))
    stored = layout.pack(canonical, **width_of(layout))
    together = torch.cat([x.flatten() for x in stored.values()]).sort().values
    assert torch.equal(together, torch.arange(1, len(together) + 1))


def test_the_shapes_are_told_without_moving_anything(layout: Layout) -> None:
    canonical = example(layout)
    shapes = {name: tuple(x.shape) for name, x in canonical.items()}
    stored = layout.pack(canonical, **width_of(layout))
    sizes = layout.canonical_sizes(shapes, {})
    assert {n: p.shape(sizes) for n, p in layout.patterns.items()} == {
        name: tuple(x.shape) for name, x in stored.items()
    }
    read = layout.sizes({n: tuple(x.shape) for n, x in stored.items()}, known_of(layout))
    assert layout.canonical_shapes(stored, read) == shapes


def test_biases_may_be_absent(layout: Layout) -> None:
    canonical = {
        name: x
        for name, x in example(layout).items()
        if name in tensors_of(layout, with_biases=False)
    }
    again = layout.unpack(layout.pack(canonical, **width_of(layout)), **known_of(layout))
    assert again.keys() == canonical.keys()


def test_conversion_by_steps_gives_the_canonical_form_and_comes_back(layout: Layout) -> None:
    """`convert` goes another way than pack and unpack: by plans, piece by piece."""
    bare = Layout(
        name="bare",
        tensors={
            tensor: f"{tensor}: {' '.join(AXES[tensor])}"
            for tensor in layout.canonical_tensor_names
        },
        function=layout.function,
        source="headwise.function.weights",
    )
    canonical = example(layout, dtype=torch.float32)
    stored = layout.pack(canonical, **width_of(layout))
    made = convert(stored, layout, bare, **known_of(layout))
    assert made.keys() == canonical.keys()
    assert [name for name, x in canonical.items() if not same_bytes(made[name], x)] == []
    back = convert(made, bare, layout, **known_of(layout))
    assert back.keys() == stored.keys()
    assert [name for name, x in stored.items() if not same_bytes(back[name], x)] == []


def test_it_is_described(layout: Layout) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", layout.name)
    assert layout.source
    assert not layout.source.endswith(".")
    assert layout.where.keys() <= ROLES
    assert all(template.endswith((".", "/")) for template in layout.where.values())
    for text in (layout.source, layout.note, layout.unchecked):
        assert "\n" not in text
        assert not re.search(r"\s\s|(?<!\S)/\w", text), "a path of a machine, or two blanks"


# Of models that cannot be built with fewer kv heads than heads.
WITH_ALL_KV_HEADS = (
    "annotated",
    "bart",
    "bert",
    "bloom",
    "clip",
    "gpt2",
    "gptj",
    "neox",
    "opt",
    "t5",
    "torch-packed",
    "vit",
    "whisper",
)


@pytest.mark.parametrize("name", WITH_ALL_KV_HEADS)
def test_fewer_kv_heads_are_refused_by_what_cannot_have_them(name: str) -> None:
    one = PUBLISHED[name]
    sizes = sizes_of(one) | {"kv_heads": 3}
    with pytest.raises(ShapeError, match=r"wk of shape \(3, 10, "):
        one.pack(numbered(sizes, tensors_of(one) - {*BIASES}), **width_of(one))


def test_names_are_those_of_the_registry() -> None:
    assert all(by_name(name) is one for name, one in PUBLISHED.items())
    assert len(PUBLISHED) == sum(len(family) for family in catalogue_by_family().values())


def test_what_is_called_checked_is_run_by_a_test() -> None:
    """A layout without a reason is one whose real implementation some test runs, and only that."""
    run = {name for cases in real_cases() for name in cases}
    assert {name for name, one in PUBLISHED.items() if not one.unchecked} == run


def test_most_are_checked() -> None:
    assert sum(not one.unchecked for one in PUBLISHED.values()) >= 36


def test_a_mix_up_cannot_pass(layout: Layout) -> None:
    """The tensors of one read as those of another are other matrices, or another function.

    Both in sizes where few axes coincide, and where all matrices are square, which is where a
    mistake has the most room.
    """
    passing = {
        frozenset({layout.name, other.name})
        for other in PUBLISHED.values()
        if other is not layout and can_be_mixed_up(layout, other)
    }
    known = {pair for names in SYNONYMS for pair in map(frozenset, combinations(names, 2))}
    assert passing - known == set()


def test_the_synonyms_are_some() -> None:
    for names, reason in SYNONYMS.items():
        assert reason
        for pair in combinations(sorted(names), 2):
            either = permutations([PUBLISHED[name] for name in pair])
            assert any(can_be_mixed_up(*ordered) for ordered in either), pair


def test_mix_ups_are_looked_for() -> None:
    """The search finds the same layout by another name, and not one of another order."""
    one = PUBLISHED["gpt2"]
    assert can_be_mixed_up(one, replace(one, name="again"))
    assert not can_be_mixed_up(one, replace(one, name="jais", function=AttentionSpec(scale=1.0)))
    for order in ("wq wv wk", "wk wq wv"):
        a, b, c = order.split()
        axis = f"([{a}: heads head_dim | {b}: heads head_dim | {c}: heads head_dim])"
        other = replace(one, tensors={**one.tensors, "c_attn.weight": f"embed_dim {axis}"})
        assert not can_be_mixed_up(one, other)


def numbered(sizes: Mapping[str, int], tensors: set[str]) -> State:
    """Canonical tensors whose entries are all different, counted from 1."""
    state, first = {}, 1
    for tensor in sorted(tensors):
        shape = [sizes[axis] for axis in AXES[tensor]]
        state[tensor] = torch.arange(first, first + prod(shape)).reshape(shape)
        first += prod(shape)
    return state


def regimes() -> Iterator[Sizes]:
    """Sizes that differ, and those of square matrices, with fewer kv heads or as many."""
    yield SIZES
    square = {"head_dim": 10, "value_dim": 10, "embed_dim": 120, "source_dim": 120, "out_dim": 120}
    yield SIZES | square
    yield SIZES | square | {"kv_heads": 12}


def can_be_mixed_up(one: Layout, other: Layout) -> bool:
    """Whether tensors of ``one`` pass as those of ``other`` and mean the same, at any sizes."""
    if one.function != other.function or one.tensors.keys().isdisjoint(other.tensors):
        return False
    return any(pass_as(one, other, sizes) for sizes in regimes())


def pass_as(one: Layout, other: Layout, regime: Sizes) -> bool:
    """Whether a module of ``one`` is read as the same one by ``other``."""
    sizes = sizes_of(other, sizes_of(one, regime))
    known = {"heads": sizes["heads"], "kv_heads": sizes["kv_heads"], "rotary_width": ROTARY_WIDTH}
    for tensors in (tensors_of(one), tensors_of(one) - {*BIASES}):
        try:
            stored = one.pack(numbered(sizes, tensors), rotary_width=ROTARY_WIDTH)
            read = other.unpack(stored, **known)
        except (OptionError, ShapeError):
            continue  # refused, which is what should be
        if not list_differing_tensors(one.unpack(stored, **known), read):
            return True
    return False


def real_cases() -> Iterator[Mapping[str, object]]:
    for path in sorted(Path(__file__).parent.glob("test_real_*.py")):
        yield import_module(f"tests.layouts.{path.stem}").CASES
