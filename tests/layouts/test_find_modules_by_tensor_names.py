"""Places: where the modules of a checkpoint stand, by names alone."""

from dataclasses import replace

import pytest

from headwise.layouts._layout import SLOT, Layout
from headwise.layouts.modules import (
    NamedPosition,
    NameForm,
    find_modules,
    find_unlisted_tensors_of_module,
    locate_weight_outside_attention,
)
from headwise.layouts.registry import catalogue_by_family

PUBLISHED = {one.name: one for family in catalogue_by_family().values() for one in family}
PLACED = sorted(name for name, one in PUBLISHED.items() if one.where)
ONE = Layout(
    name="one",
    tensors={
        "q": "([wq: heads head_dim | wk: heads head_dim | wv: heads head_dim]) embed_dim",
        "o": "wo: out_dim (heads head_dim)",
    },
    where={"self": "h.{layer}.attn.", "cross": "h.{layer}.cross."},
    outside={"h.{layer}.norm": "norm: embed_dim", "emb": "emb: vocabulary embed_dim"},
    source="here",
)


def test_modules_with_their_roots_roles_and_numbers() -> None:
    names = ["emb", *(f"a.h.{n}.{m}.{t}" for n in (0, 10) for m in ("attn", "cross") for t in "qo")]
    found = find_modules(ONE, names)
    assert [module.place for module in found] == [
        NamedPosition("a.", role, (("layer", str(n)),))
        for n in (0, 10)
        for role in ("self", "cross")
    ]
    assert found[1].tensors == {"a.h.0.cross.q": "q", "a.h.0.cross.o": "o"}
    assert found[1].place.fill_name_template("{layer}/x.") == "a.0/x."
    assert found[1].place.in_name_form(NameForm(root="b.")).fill_name_template("{layer}.") == "b.0."


def test_what_stands_within_and_is_none_of_it_is_beside() -> None:
    (module,) = find_modules(ONE, ["h.0.attn.q", "h.0.attn.o", "h.0.attn.mask", "h.0.norm"])
    assert module.beside == ("h.0.attn.mask",)


@pytest.mark.parametrize("name", ["xh.0.attn.q", "h.x.attn.q", "h.0.attnq", "h.0.attn"])
def test_names_that_only_look_alike_are_none(name: str) -> None:
    assert find_modules(ONE, [name]) == []


def test_a_module_elsewhere_is_found_by_its_tensors_if_it_is_whole() -> None:
    (module,) = find_modules(ONE, ["x.y.q", "x.y.o", "x.y.other", "z.q"])
    assert (module.prefix, module.place.role) == ("x.y.", "")
    assert module.beside == ("x.y.other",)
    (bare,) = find_modules(ONE, ["q", "o"])
    assert (bare.prefix, bare.tensors) == ("", {"q": "q", "o": "o"})


def test_layer_10_stands_behind_layer_2_and_the_decoder_behind_the_encoder() -> None:
    where = {"encoder": "encoder.{layer}.", "decoder": "decoder.{layer}."}
    places = [f"{side}.{n}." for side in ("decoder", "encoder") for n in (10, 2)]
    names = [place + tensor for place in places for tensor in "qo"]
    found = [module.prefix for module in find_modules(replace(ONE, where=where), names)]
    assert found == ["encoder.2.", "encoder.10.", "decoder.2.", "decoder.10."]


def test_a_layer_is_counted_by_its_name_and_not_by_how_many_are_there() -> None:
    """Between them may be layers without attention: recurrent ones, or convolutions."""
    known = [f"model.layers.{n}.self_attn.{p}_proj.weight" for n in (7, 11) for p in "qkvo"]
    own = [f"tower2.{n}.{p}_proj.weight" for n in (5,) for p in "qkvo"]
    bare = [f"{p}_proj.weight" for p in "qkvo"]
    found = find_modules(PUBLISHED["llama"], [*own, *known, *bare])
    assert {module.prefix: module.layer for module in found} == {
        "": 0,
        "tower2.5.": 5,
        "model.layers.7.self_attn.": 7,
        "model.layers.11.self_attn.": 11,
    }


def test_what_is_attention_in_other_names_is_not_overlooked() -> None:
    one, other = find_modules(ONE, ["h.0.attn.q", "h.0.attn.o", "h.1.attn.qweight"])
    assert (one.prefix, other.prefix) == ("h.0.attn.", "h.1.attn.")
    assert find_unlisted_tensors_of_module(other, ONE) == ["h.1.attn.qweight"]
    half, whole = find_modules(ONE, ["x.0.q", "x.1.q", "x.1.o"])
    assert (half.prefix, whole.prefix) == ("x.0.", "x.1.")
    assert half.tensors.keys() == {"x.0.q"}


def test_other_things_of_a_block_are_no_attention() -> None:
    """Where the tensors of attention stand among those of the block."""
    block = replace(ONE, where={"self": "h.{layer}."})
    (module,) = find_modules(block, ["h.0.q", "h.0.o", "h.1.conv"])
    assert module.prefix == "h.0."


def test_modules_elsewhere_are_found_beside_those_at_known_places() -> None:
    found = find_modules(ONE, ["h.0.attn.q", "h.0.attn.o", "x.y.q", "x.y.o"])
    assert [(module.prefix, module.place.role) for module in found] == [
        ("h.0.attn.", "self"),
        ("x.y.", ""),
    ]


BASED = replace(
    ONE,
    where={"self": "model.layers.{layer}.attn."},
    outside={"model.emb": "emb: vocabulary embed_dim", "head": "head: vocabulary embed_dim"},
)


@pytest.mark.parametrize("root", ["", "tower."])
def test_a_base_model_is_stored_without_the_word_that_a_head_calls_it_by(root: str) -> None:
    names = [f"{root}layers.{n}.attn.{t}" for n in range(2) for t in "qo"]
    found = find_modules(BASED, [*names, f"{root}emb"])
    assert [module.place for module in found] == [
        NamedPosition(root, "self", (("layer", str(n)),), is_base=True) for n in range(2)
    ]
    place = NamedPosition(root, "model.emb", is_base=True)
    assert locate_weight_outside_attention(BASED, f"{root}emb", [root]) == ("model.emb", place)
    assert locate_weight_outside_attention(BASED, "model.emb", [""]) == (
        "model.emb",
        NamedPosition("", "model.emb"),
    )
    assert place.fill_name_template("model.emb") == f"{root}emb"
    assert place.fill_name_template("emb") == f"{root}emb"
    assert (
        place.in_name_form(NameForm(base=False)).fill_name_template("model.emb")
        == f"{root}model.emb"
    )
    assert NameForm.shared_by(found) == NameForm(root=root, base=True)
    assert NameForm.shared_by([]) == NameForm()


def test_another_tower_of_a_base_model_is_not_taken_for_a_part_of_it() -> None:
    names = [f"a.layers.0.attn.{t}" for t in "qo"] + ["b.layers.0.attn.q"]
    assert [module.prefix for module in find_modules(BASED, names)] == ["a.layers.0.attn."]


def test_an_unembedding_stands_under_no_root() -> None:
    assert locate_weight_outside_attention(BASED, "head", ["model."]) == (
        "head",
        NamedPosition("", "head"),
    )


def test_outside() -> None:
    assert locate_weight_outside_attention(ONE, "a.h.7.norm", ["a."]) == (
        "h.{layer}.norm",
        NamedPosition("a.", "h.{layer}.norm", (("layer", "7"),)),
    )
    assert locate_weight_outside_attention(ONE, "b.h.7.norm", ["a."]) is None
    assert locate_weight_outside_attention(ONE, "a.h.7.norm.more", ["a."]) is None


@pytest.mark.parametrize("root", ["", "some.model."])
@pytest.mark.parametrize("name", PLACED)
def test_every_layout_finds_its_own_modules(name: str, root: str) -> None:
    one = PUBLISHED[name]
    numbers = {"layer": "11", "stage": "2", "half": "1"}
    for role, template in one.where.items():
        assert {*SLOT.findall(template)} <= numbers.keys()
        prefix = root + template.format(**numbers)
        (module,) = find_modules(one, [prefix + local for local in one.tensors])
        assert (module.prefix, module.place.role, module.place.root) == (prefix, role, root)
        assert list(module.tensors.values()) == list(one.tensors)
        assert module.beside == ()
        assert module.place.fill_name_template(template) == prefix


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_every_layout_finds_a_module_elsewhere(name: str) -> None:
    one = PUBLISHED[name]
    for prefix in ("", "else.where."):
        (module,) = find_modules(one, [prefix + local for local in one.tensors])
        assert module.prefix == prefix
        assert list(module.tensors.values()) == list(one.tensors)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_every_layout_finds_what_is_outside(name: str) -> None:
    one = PUBLISHED[name]
    for template in one.outside:
        numbers = dict.fromkeys(SLOT.findall(template), "3")
        found = locate_weight_outside_attention(
            one, "root." + template.format(**numbers), ["root."]
        )
        assert found is not None
        assert found[0] == template
