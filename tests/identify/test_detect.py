"""detect: on one file of every entry of the catalogue, right or honestly undecidable."""

import pytest
import torch

import headwise
from headwise.errors import CheckpointError, HeadwiseError, OptionError, UndecidedError
from headwise.function.weights import State
from headwise.identify.candidates import CandidateLayout, query_and_kv_head_counts
from headwise.identify.detection import (
    Detection,
    detect_by_names_and_shapes,
    narrow_by_reference_values,
)
from headwise.layouts._layout import Layout
from headwise.layouts.equality import list_differing_tensors
from headwise.layouts.registry import layout, layouts_by_name
from tests.layouts.examples import ROTARY_WIDTH, example, known_of, width_of
from tests.quick import others_slow

NAMES = sorted(layouts_by_name())
LAYERS = 2
UNCOUNTED = pytest.param(False, marks=pytest.mark.slow)  # every number of heads is tried


def stored(of: Layout, canonical: list[State]) -> State:
    """A checkpoint with some layers, at the first place that the layout knows."""
    found: State = {}
    for number, state in enumerate(canonical):
        template = next(iter(of.where.values()), "blocks.{layer}.attention.")
        prefix = template.format_map({"layer": number, **dict.fromkeys(SLOTS, 0)})
        found |= {prefix + name: x for name, x in of.pack(state, **width_of(of)).items()}
        found |= {prefix + name: torch.ones(1) for name in of.marks}
    return found


SLOTS = ("stage", "block", "half")


def file_of(of: Layout, layers: int = LAYERS) -> tuple[State, list[State]]:
    is_numbered = "{" in next(iter(of.where.values()), "{layer}")
    canonical = [example(of, seed=seed) for seed in range(layers if is_numbered else 1)]
    return stored(of, canonical), canonical


def names_of(found: Detection) -> list[set[str]]:
    return [{one.layout.name for one in group} for group in found.candidates]


def candidate(name: str, found: Detection) -> CandidateLayout:
    (one,) = [one for group in found.candidates for one in group if one.layout.name == name]
    return one


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_counted", [True, UNCOUNTED], ids=["counts", "no-counts"])
def test_right_or_undecidable(name: str, is_counted: bool) -> None:
    file, canonical = file_of(layout(name))
    found = detect_by_names_and_shapes(file, **(known_of(layout(name)) if is_counted else {}))
    assert any(name in group for group in names_of(found))
    if found.layout is not None:
        assert name in names_of(found)[0]
    for group in found.candidates:
        assert len(group[0].modules) == len(canonical)


@pytest.mark.parametrize("name", others_slow(NAMES, *NAMES[::9]))
def test_a_reference_leaves_what_reads_the_same(name: str) -> None:
    of = layout(name)
    file, canonical = file_of(of)
    known = known_of(of)
    found = detect_by_names_and_shapes(file, **known)
    try:
        reference = stored(layout("headwise"), canonical)
    except HeadwiseError:
        pytest.skip("holds what headwise.Attention has no parameter for")
    other = detect_by_names_and_shapes(reference, described="headwise", **known)
    decided = narrow_by_reference_values(found, file, other, reference)
    assert any(name in group for group in names_of(decided))
    for group in decided.candidates:
        for one in group:
            for number, state in enumerate(canonical):
                reading = one.layout_reading(one.fits[0], module=number)
                read = reading.read({key: file[key] for key in reading.names})
                assert not list_differing_tensors(read, state)


def test_the_first_head_is_not_enough() -> None:
    """Rows of [q, k, v] and of each head's q, k, v begin alike."""
    of, other = layout("torch-packed"), layout("deberta")
    state = {name: x for name, x in example(of).items() if name in other.canonical_tensor_names}
    packed = of.pack(state)["in_proj_weight"]
    by_head = other.pack(state)["self.in_proj.weight"]
    head_dim = state["wq"].shape[1]
    assert torch.equal(packed[:head_dim], by_head[:head_dim])
    assert not torch.equal(packed, by_head)


def test_a_reference_of_other_weights_refutes_everything() -> None:
    of = layout("gpt2")
    file, _ = file_of(of)
    other = stored(layout("headwise"), [example(of, seed=9) for _ in range(LAYERS)])
    found = detect_by_names_and_shapes(file, **known_of(of))
    decided = narrow_by_reference_values(
        found, file, detect_by_names_and_shapes(other, described="headwise", heads=12), other
    )
    assert decided.layout is None
    assert not decided.candidates
    assert "differs from the reference in queries of all 12 heads" in decided.refuted["gpt2"]


def test_the_config_decides_among_those_that_fit() -> None:
    file, _ = file_of(layout("cohere"))
    known = known_of(layout("cohere"))
    assert len(detect_by_names_and_shapes(file, **known).candidates) > 1
    found = detect_by_names_and_shapes(file, described="cohere", **known)
    assert found.require_only_layout().name == "cohere"
    assert found.refuted["llama"] == "the metadata says cohere"


def test_a_model_that_the_catalogue_does_not_know_is_not_decided_by_its_names() -> None:
    file, _ = file_of(layout("hunyuan"))
    said = {"model_type": "a_new_model"}  # whose pairs may be neighbours
    found = detect_by_names_and_shapes(file, config=said, **known_of(layout("hunyuan")))
    assert names_of(found) == [{"hunyuan"}]
    assert (found.layout, found.unknown) == (None, "a_new_model")
    with pytest.raises(OptionError, match="model, with the names and shapes of hunyuan"):
        found.require_only_layout()
    known = detect_by_names_and_shapes(
        file, config={"model_type": "hunyuan_v1_dense"}, **known_of(layout("hunyuan"))
    )
    assert known.require_only_layout().name == "hunyuan"


def test_what_the_config_says_against_a_layout_refutes_it() -> None:
    file, _ = file_of(layout("bert"))
    said = {"model_type": "bert", "position_embedding_type": "alibi"}
    found = detect_by_names_and_shapes(file, config=said, **known_of(layout("bert")))
    assert found.layout is None
    assert "the config says position_embedding_type alibi" in found.refuted["bert"]
    assert found.contradiction is not None
    assert found.contradiction.startswith(
        "the config says model_type bert, whose layout is bert, but score_bias: none; the config "
    )


def test_a_config_of_another_known_model_is_a_contradiction() -> None:
    file, canonical = file_of(layout("bert"))
    known = known_of(layout("bert"))
    found = detect_by_names_and_shapes(file, config={"model_type": "gptj"}, **known)
    assert any("bert" in group for group in names_of(found))
    assert found.layout is None
    said = "the config says model_type gptj, whose layout is gptj, but the names or shapes are not "
    assert found.contradiction == f"{said}those of gptj"
    assert str(found).startswith("the checkpoint contradicts its config: the config says")
    with pytest.raises(UndecidedError, match=r"bert.*, where the config says model_type gptj"):
        found.require_only_layout()
    # Values decide all the same, and the contradiction is still said.
    other = stored(layout("headwise"), canonical)
    reference = detect_by_names_and_shapes(other, described="headwise", **known)
    decided = narrow_by_reference_values(found, file, reference, other)
    assert any("bert" in group for group in names_of(decided))
    assert decided.contradiction == found.contradiction
    assert str(decided).endswith(f"The config contradicts this: {found.contradiction}.")


def test_a_contradiction_is_not_decided_where_one_layout_alone_fits() -> None:
    file, _ = file_of(layout("hunyuan"))
    found = detect_by_names_and_shapes(
        file, config={"model_type": "gptj"}, **known_of(layout("hunyuan"))
    )
    assert names_of(found) == [{"hunyuan"}]
    assert found.contradiction is not None
    assert found.layout is None
    with pytest.raises(UndecidedError):
        found.require_only_layout()


def test_an_answer_says_what_was_compared() -> None:
    file, canonical = file_of(layout("phi3"))
    known = known_of(layout("phi3"))
    names_alone = detect_by_names_and_shapes(file, described="phi3", **known)
    assert names_alone.layout is not None
    assert names_alone.compared == ("names", "shapes", "metadata")
    assert "Only names, shapes and metadata were compared, values were not checked" in str(
        names_alone
    )
    with_config = detect_by_names_and_shapes(file, config={"model_type": "phi3"}, **known)
    assert "Only names, shapes and config were compared, values were not" in str(with_config)
    other = stored(layout("headwise"), canonical)
    decided = narrow_by_reference_values(
        names_alone, file, detect_by_names_and_shapes(other, described="headwise", **known), other
    )
    assert decided.compared == ("names", "shapes", "metadata", "values")
    assert "were not checked" not in str(decided)


def test_a_layout_that_knows_some_of_the_attention_only_goes() -> None:
    """BART's decoder has OPT's names, and attends to the encoder as well."""
    whole, _ = file_of(layout("bart"))
    whole = {f"model.{name}": x for name, x in whole.items()}
    decoder = {name.replace("encoder.", "decoder."): x for name, x in whole.items()}
    renamed = {n.replace("self_attn", "encoder_attn"): x for n, x in decoder.items()}
    found = detect_by_names_and_shapes(whole | decoder | renamed, heads=12)
    assert all(len(one.modules) == 6 for group in found.candidates for one in group)
    assert any("bart" in group for group in names_of(found))


def test_of_layouts_of_one_map_the_one_that_knows_the_names_around_comes_first() -> None:
    lens, _ = file_of(layout("transformer-lens-encoder"))
    for name in ("transformer-lens-encoder", "transformer-lens"):
        file = lens | dict.fromkeys(layout(name).outside, torch.zeros(2, 3))
        first = detect_by_names_and_shapes(file, heads=12).candidates[0][0]
        assert first.layout.name == name
        assert first.around == len([n for n in layout(name).outside if "{" not in n])


def test_a_config_that_does_not_fit_decides_nothing() -> None:
    file, _ = file_of(layout("cohere"))
    known = known_of(layout("cohere"))
    assert names_of(detect_by_names_and_shapes(file, described="gpt2", **known)) == names_of(
        detect_by_names_and_shapes(file, **known)
    )


def test_several_are_refused_with_their_names() -> None:
    file, _ = file_of(layout("cohere"))
    with pytest.raises(OptionError, match=r"may be in \d+ layouts: .*cohere"):
        detect_by_names_and_shapes(file, **known_of(layout("cohere"))).require_only_layout()


def test_none_is_said() -> None:
    with pytest.raises(OptionError, match="no attention layer of a known layout"):
        detect_by_names_and_shapes({"weight": torch.zeros(3, 4)}).require_only_layout()


def test_heads_that_do_not_fit_leave_no_candidate() -> None:
    file, _ = file_of(layout("gpt2"))
    assert not detect_by_names_and_shapes(file, heads=7).candidates


def test_a_reference_with_another_last_head_refutes() -> None:
    of = layout("gpt2")
    file, canonical = file_of(of)
    canonical[-1]["wv"] = canonical[-1]["wv"].clone()
    canonical[-1]["wv"][-1] += 1
    other = stored(layout("headwise"), canonical)
    found = detect_by_names_and_shapes(file, **known_of(of))
    decided = narrow_by_reference_values(
        found, file, detect_by_names_and_shapes(other, described="headwise", heads=12), other
    )
    assert not decided.candidates
    assert decided.refuted["gpt2"] == (
        "`h.1.attn.` differs from the reference in values of kv head 11; before it, 1 of 2 modules "
        "agree"
    )


def test_the_share_that_turns_is_found_by_values() -> None:
    of = layout("gptj")
    file, canonical = file_of(of)  # of which ROTARY_WIDTH of 10 channels turn
    plain = [{n: x for n, x in one.items() if not n.startswith("b")} for one in canonical]
    other = stored(layout("llama"), plain)
    found = detect_by_names_and_shapes(file, heads=12)
    decided = narrow_by_reference_values(
        found,
        file,
        detect_by_names_and_shapes(other, described="llama", heads=12, kv_heads=12),
        other,
    )
    assert candidate("gptj", decided).fits[0]["rotary_width"] == ROTARY_WIDTH


@pytest.mark.parametrize(("name", "kv_heads"), [("neox", 12), ("falcon-40b", 3), ("gpt2", 12)])
def test_values_decide_where_nobody_said_how_many_heads(name: str, kv_heads: int) -> None:
    """Other numbers fit the shapes as well, and come first."""
    of = layout(name)
    file, canonical = file_of(of)
    other = stored(layout("headwise"), canonical)
    found = detect_by_names_and_shapes(file)
    assert len(candidate(name, found).fits) > 1
    reference = detect_by_names_and_shapes(other, described="headwise", heads=12, kv_heads=kv_heads)
    decided = narrow_by_reference_values(found, file, reference, other)
    assert [query_and_kv_head_counts(fit) for fit in candidate(name, decided).fits] == [
        (12, kv_heads)
    ]


def test_layouts_that_are_the_same_for_some_heads_stay_apart() -> None:
    """Grouped rows read as [query, key, value] of each head: so they are, with a kv head each."""
    file, _ = file_of(layout("falcon-40b"))
    mine = {"megatron", "neox-gqa", "falcon-40b"}
    for group in names_of(detect_by_names_and_shapes(file, heads=12)):
        assert not (group & mine and group & {"falcon-7b", "falcon-rw", "bloom"})


LAST = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (None, "is missing"),
        (torch.zeros(16, 16), "is of shape (16, 16), and "),
        (torch.zeros(0, 16), "is of shape (0, 16), and "),
        (torch.zeros(()), "is of shape (), and "),
        (torch.zeros(30, 40, dtype=torch.int32), "is torch.int32, and "),
    ],
)
@pytest.mark.parametrize("layer", [0, 1])
def test_every_layer_has_to_be_whole(layer: int, other: torch.Tensor | None, said: str) -> None:
    file, _ = file_of(layout("llama"))
    name = LAST.replace("1", str(layer))
    del file[name]
    file |= {} if other is None else {name: other}
    found = detect_by_names_and_shapes(file, described="llama", heads=12, kv_heads=3)
    assert found.layout is None
    assert not found.candidates
    assert "llama" in {one.layout.name for one in found.damaged[0]}
    (fault,) = found.damaged[0][0].faults
    assert fault.startswith(f"`{name}` {said}")
    assert fault in str(found)
    with pytest.raises(CheckpointError, match=name):
        found.require_only_layout()


KVQ = {"qkv_proj.weight": (96, 32), "qkv_proj.bias": (96,), "out_proj.weight": (32, 32)}


def test_the_place_tells_keys_first_from_four_shards() -> None:
    """metaseq and codegen share names and shapes where there is no bias."""
    file = {
        f"decoder.layers.{layer}.self_attn.{name}": torch.randn(shape)
        for layer in (0, 1)
        for name, shape in KVQ.items()
        if "bias" not in name
    }
    found = headwise.detect(file, heads=4)
    assert found.require_only_layout().name == "metaseq"
    assert "  not codegen: its modules are at `h.{layer}.attn.`, those here at `dec" in str(found)
    moved = {name.replace("decoder.layers", "h"): x for name, x in file.items()}
    moved = {name.replace("self_attn", "attn"): x for name, x in moved.items()}
    assert headwise.detect(moved, heads=4).require_only_layout().name == "codegen"


def test_rows_of_metaseq_are_keys_values_queries() -> None:
    within = "decoder.layers.0.self_attn."
    file = {within + name: torch.randn(shape) for name, shape in KVQ.items()}
    file[within + "out_proj.bias"] = torch.randn(32)
    assert headwise.detect(file, heads=4).require_only_layout().name == "metaseq"
    moved = headwise.convert(file, "metaseq", "opt", heads=4)
    for kind in ("weight", "bias"):
        rows = file[f"{within}qkv_proj.{kind}"].split(32)
        for letter, part in zip("kvq", rows, strict=True):
            assert torch.equal(moved[f"{within}{letter}_proj.{kind}"], part)


def test_another_place_decides_nothing_and_a_reference_does() -> None:
    placed, _ = file_of(layout("codegen"))
    file = {name.replace("h.", "trunk."): x for name, x in placed.items()}
    known = known_of(layout("codegen"))
    found = detect_by_names_and_shapes(file, **known)
    assert found.layout is None
    assert {"codegen", "metaseq"} == {one.layout.name for g in found.misplaced for one in g}
    assert "place: its modules are at `h.{layer}.attn.`, those here at `trunk." in str(found)
    with pytest.raises(UndecidedError, match="names and shapes of codegen, metaseq, but at anot"):
        found.require_only_layout()
    reference = detect_by_names_and_shapes(placed, **known)
    decided = narrow_by_reference_values(found, file, reference, placed)
    assert decided.require_only_layout().name == "codegen"
    stated = detect_by_names_and_shapes(file, config={"model_type": "codegen"}, **known)
    assert stated.require_only_layout().name == "codegen"


def layers_of(*stacks: tuple[str, tuple[int, ...]]) -> State:
    """Attention with the names of Llama, or of BART, in some layers of some stacks."""
    return {
        f"{stack}{layer}.self_attn.{name}.weight": torch.randn(32, 32)
        for stack, layers in stacks
        for layer in layers
        for name in ("q_proj", "k_proj", "v_proj", "out_proj" if "coder" in stack else "o_proj")
    }


LLAMA = {"model_type": "llama", "num_attention_heads": 4, "hidden_size": 32}
BART = {"model_type": "bart", "encoder_attention_heads": 4, "decoder_attention_heads": 4}
BART |= {"encoder_layers": 2, "decoder_layers": 3, "num_hidden_layers": 2}
CLIP = {"model_type": "clip", "text_config": {"num_hidden_layers": 2, "num_attention_heads": 4}}
CLIP |= {"vision_config": {"num_hidden_layers": 3, "num_attention_heads": 4}}


@pytest.mark.parametrize(
    ("config", "stacks", "said"),
    [
        (LLAMA, (("model.layers.", (0,)),), "`model.layers.1` is missing: the config says 2 l"),
        (LLAMA, (("model.layers.", (0, 2)),), "`model.layers.1` is missing: the config says 2 l"),
        (
            LLAMA | {"num_hidden_layers": 4},
            (("layers.", (2,)),),
            "`layers.0` and 2 more layers are",
        ),
        (BART, (("encoder.layers.", (0, 1)), ("decoder.layers.", (0, 2))), "`decoder.layers.1` is"),
        (CLIP, (("vision_model.encoder.layers.", (0, 2)),), "`vision_model.encoder.layers.1` is"),
    ],
)
def test_the_layers_that_the_config_counts_have_to_be_there(
    config: dict[str, object], stacks: tuple[tuple[str, tuple[int, ...]], ...], said: str
) -> None:
    found = headwise.detect(layers_of(*stacks), config={"num_hidden_layers": 2} | config)
    assert found.layout is None
    assert not found.candidates
    assert said in str(found)
    with pytest.raises(CheckpointError, match=said.split("`")[1]):
        found.require_only_layout()


def test_layers_without_attention_and_those_of_other_towers_are_not_missing() -> None:
    mlp = {"model.layers.1.mamba.in_proj.weight": torch.randn(64, 32)}
    hybrid = layers_of(("model.layers.", (0, 2))) | mlp
    extra = layers_of(("model.layers.", (0, 1, 2, 3)))  # the last predicts a second token
    for file in (hybrid, extra):
        found = headwise.detect(file, config=LLAMA | {"num_hidden_layers": 3})
        assert found.require_only_layout().name == "llama"
    towers = (("text_model.encoder.layers.", (0, 1)), ("vision_model.encoder.layers.", (0, 1, 2)))
    assert headwise.detect(layers_of(*towers), config=CLIP).require_only_layout().name == "clip"
    sides = (("encoder.layers.", (0, 1)), ("decoder.layers.", (0, 1, 2)))
    assert headwise.detect(layers_of(*sides), config=BART).require_only_layout().name == "bart"
