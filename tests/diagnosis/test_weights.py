"""headwise.detect and headwise.verify from Python: paths, state dicts, and what is refused."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import headwise
from headwise.errors import HeadwiseError, OptionError, UndecidedError
from headwise.function.weights import State
from headwise.identify.results import Verdict
from headwise.layouts import registry
from tests.quick import others_slow

CONFIG = {"model_type": "gpt2", "n_head": 6}
LAST = "transformer.h.1.attn.c_proj.weight"


@pytest.fixture
def state() -> State:
    """The attention of two layers in GPT-2's names: embed_dim 48, 6 heads of 8."""
    generator = torch.Generator().manual_seed(0)
    return {
        f"transformer.h.{layer}.attn.{name}.weight": torch.randn(48, width, generator=generator)
        for layer in range(2)
        for name, width in (("c_attn", 144), ("c_proj", 48))
    }


@pytest.fixture
def folder(state: State, tmp_path: Path) -> Path:
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def with_one_wrong(state: State) -> State:
    """Rows 16 and 41 of the last output projection are those of heads 2 and 5."""
    other = state | {LAST: state[LAST].clone()}
    for row in (16, 41):
        other[LAST][row] += 1
    return other


def test_a_folder_and_a_state_dict_have_one_answer(state: State, folder: Path) -> None:
    stored, held = headwise.detect(folder), headwise.detect(state, config=CONFIG)
    assert stored == held
    assert stored.layout is not None
    assert stored.layout.name == "gpt2"
    assert stored.compared == ("names", "shapes", "config")
    assert headwise.detect(str(folder)) == stored


def test_nothing_is_decided_where_several_fit(state: State) -> None:
    found = headwise.detect(state, heads=6)
    assert found.layout is None
    assert {"gpt2", "jais"} <= {one.layout.name for group in found.candidates for one in group}
    assert "undecidable" in str(found)


def test_a_reference_in_memory_decides(state: State) -> None:
    elsewhere = headwise.convert(state, "gpt2", "opt", heads=6)
    found = headwise.detect(state, reference=elsewhere, heads=6)
    assert found.compared[-1] == "values"
    assert found.candidates
    other = headwise.detect(state, reference=with_one_wrong(state), heads=6)
    assert not other.candidates
    differs = "differs from the reference in output projection of heads 2 and 5"
    assert f"`transformer.h.1.attn.` {differs}" in other.refuted["gpt2"]


def test_one_tensor_that_is_wrong_is_named_with_its_heads(state: State, folder: Path) -> None:
    assert headwise.verify(folder, state, config=CONFIG)
    found = headwise.verify(folder, with_one_wrong(state), config=CONFIG)
    assert not found
    assert found.tensors is not None
    assert (found.tensors.same, found.tensors.total) == (3, 4)
    assert str(found).endswith(
        f"Not the same: 3 of 4 tensors are equal; `{LAST}` differs (output projection of heads 2 "
        "and 5)."
    )


def test_the_outputs_are_compared_as_well(state: State) -> None:
    found = headwise.verify(state, with_one_wrong(state), config=CONFIG, outputs=True)
    assert [layer.is_same for layer in found.outputs] == [True, False]
    assert "`transformer.h.1.attn`: OTHER OUTPUTS; the difference is " in str(found)


def test_counts_that_change_no_verdict_are_not_needed(state: State) -> None:
    stored = torch.nn.MultiheadAttention(30, 5).state_dict()
    assert headwise.verify(stored, stored).verdict is Verdict.SAME
    assert headwise.compare(stored, headwise.convert(stored, "torch-packed", "gpt2", heads=5))
    with pytest.raises(OptionError, match="outputs, where neither the call nor a config"):
        headwise.verify(stored, stored, outputs=True)
    assert headwise.verify(stored, stored, outputs=True, heads=5)


def test_layouts_that_are_named(state: State) -> None:
    other = headwise.convert(state, "gpt2", "opt", heads=6)
    named: dict[str, Any] = {"first_layout": "gpt2", "second_layout": "opt"}
    found = headwise.verify(state, other, heads=6, **named)
    assert found, str(found)
    assert found.layouts is not None
    assert [one.name for one in found.layouts] == ["gpt2", "opt"]


def test_what_holds_no_attention_is_undecided(state: State) -> None:
    with pytest.raises(UndecidedError, match="the second state dict, which contains no attention"):
        headwise.verify(state, {"x": torch.zeros(3)}, config=CONFIG)


K = "model.layers.1.self_attn.k_proj.weight"
LLAMA = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def llama() -> State:
    """The attention of two layers in Llama's names: embed_dim 16, 4 heads, 2 kv heads."""
    generator = torch.Generator().manual_seed(0)
    return {
        f"model.layers.{layer}.self_attn.{name}_proj.weight": torch.randn(
            rows, 16, generator=generator
        )
        for layer in range(2)
        for name, rows in (("q", 16), ("k", 8), ("v", 8), ("o", 16))
    }


@pytest.mark.parametrize("named", [{}, {"first_layout": "llama", "second_layout": "llama"}])
def test_a_tensor_that_is_missing_is_named_from_both_sides(
    llama: State, named: dict[str, Any]
) -> None:
    less = {name: x for name, x in llama.items() if name != K}
    for pair, which in (((llama, less), "first"), ((less, llama), "second")):
        found = headwise.verify(*pair, config=LLAMA, **named)
        assert str(found).endswith(
            f"Not the same: 7 of 8 tensors are equal; `{K}` is in the {which} alone."
        )


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (torch.zeros(16, 16), "shape (16, 16) against (8, 16)"),
        (torch.zeros(8, 15), "shape (8, 15) against (8, 16)"),
        (torch.zeros(()), "shape () against (8, 16)"),
        (torch.zeros(8, 16, dtype=torch.int32), "dtype torch.int32 against torch.float32"),
    ],
)
@pytest.mark.parametrize("name", [K, K.replace("1", "0")])
def test_a_tensor_of_another_shape_is_a_difference_on_either_side(
    llama: State, name: str, other: torch.Tensor, what: str
) -> None:
    wrong = llama | {name: other}
    one, two = (headwise.verify(*pair, config=LLAMA) for pair in ((wrong, llama), (llama, wrong)))
    assert f"`{name}`: {what}" in str(one)
    kind, mine, _, theirs = what.replace(", ", ",").split()
    assert f"`{name}`: {kind} {theirs} against {mine}".replace(",", ", ") in str(two)
    assert one.tensors is not None
    assert (one.tensors.same, one.tensors.total) == (7, 8)
    assert not headwise.verify(wrong, llama, config=LLAMA, outputs=True).outputs


@pytest.mark.parametrize("named", [{}, {"first_layout": "llama", "second_layout": "llama"}])
def test_two_that_are_not_whole_are_compared_all_the_same(
    llama: State, named: dict[str, Any]
) -> None:
    less = {name: x for name, x in llama.items() if name != K}
    found = headwise.verify(less, less, config=LLAMA, outputs=True, **named)
    assert found.verdict is Verdict.SAME
    assert found
    assert found.tensors is not None
    assert found.tensors.same == len(less)
    for which in ("first", "second"):
        assert f"the {which} is not whole: `{K}` is missing" in str(found)
    other = less | {name: x + 1 for name, x in less.items() if "1.self_attn.v" in name}
    found = headwise.verify(less, other, config=LLAMA, **named)
    assert found.verdict is Verdict.DIFFERENT
    name = K.replace("k_", "v_")
    assert str(found).endswith(
        f"6 of 7 tensors are equal; `{name}` differs (values of all 2 kv heads)."
    )


def in_folder(folder: Path, state: State, config: dict[str, Any]) -> Path:
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_two_models_are_not_the_same_and_each_is_named(
    llama: State, state: State, tmp_path: Path
) -> None:
    one = in_folder(tmp_path / "one", llama, LLAMA)
    other = in_folder(tmp_path / "other", state, CONFIG | {"n_head": 4})
    for pair, first in (((one, other), "llama, with heads 4, kv_heads 2"), ((other, one), "gpt2")):
        found = headwise.verify(*pair)
        assert not found
        assert f"the first is {first}" in str(found)
        assert "the second is " in str(found)


def test_other_weights_are_different_in_every_layout(llama: State) -> None:
    other = {name: x + 1 for name, x in llama.items()}
    found = headwise.verify(llama, other, heads=4, kv_heads=2)
    assert found.verdict is Verdict.DIFFERENT
    assert "read as llama and llama; no other of " in str(found)


def in_metas_names(state: State) -> State:
    """Llama's tensors under the names of Meta's code; the rows stay where they are."""
    words = (("model.", ""), ("self_attn.", "attention.w"), ("_proj", ""))
    return {
        functools.reduce(lambda name, pair: name.replace(*pair), words, name): x
        for name, x in state.items()
    }


def test_rows_that_were_not_permuted_are_not_called_the_same(llama: State) -> None:
    """In Meta's names rotary pairs are neighbours; in Llama's names they may be, in Cohere."""
    wrong = in_metas_names(llama)
    right = headwise.convert(llama, "llama", "llama-meta", heads=4, kv_heads=2)
    named: dict[str, Any] = {"first_layout": "llama-meta", "second_layout": "llama"}
    for first, verdict in ((wrong, Verdict.DIFFERENT), (right, Verdict.SAME)):
        for counts in ({"heads": 4, "kv_heads": 2}, {}):
            found = headwise.verify(first, llama, **counts)
            assert found.verdict is Verdict.INCONCLUSIVE, str(found)
            assert found.layouts is None
            assert "read as llama-meta and llama" in str(found)
            assert str(found).count("read as llama-meta and ") > 1
        assert headwise.verify(first, llama, heads=4, kv_heads=2, **named).verdict is verdict


def test_numbers_of_heads_are_not_inferred_from_agreement(llama: State) -> None:
    """The permutation of rows depends on the heads: equal rows do not show that 4 are right."""
    meta = headwise.convert(llama, "llama", "llama-meta", heads=4, kv_heads=2)
    named: dict[str, Any] = {"first_layout": "llama-meta", "second_layout": "llama"}
    found = headwise.verify(meta, llama, **named)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "heads 4, kv_heads 2: attention is equal" in str(found)
    assert "heads 2 or 8, kv_heads 1 or 4: `model.layers.0.self_attn.` differs" in str(found)
    assert headwise.verify(meta, llama, heads=4, kv_heads=2, **named)
    assert headwise.verify(meta, llama, config=LLAMA)


def test_kv_heads_that_were_repeated_are_other_weights(llama: State) -> None:
    """No numbers of heads fit both, so only the first is converted."""
    more = {
        name: x.view(2, 4, 16).repeat_interleave(2, 0).flatten(0, 1) if len(x) == 8 else x
        for name, x in llama.items()
    }
    for pair in ((more, llama), (llama, more)):
        found = headwise.verify(*pair)
        assert found.verdict is Verdict.DIFFERENT
        assert "4 of 8 tensors are equal" in str(found)


def test_the_same_names_and_bytes_are_the_same_in_every_layout(llama: State) -> None:
    found = headwise.verify(llama, {**llama})
    assert found.verdict is Verdict.SAME
    other = headwise.convert(llama, "llama", "cohere", heads=4, kv_heads=2)
    found = headwise.verify(llama, other, heads=4, kv_heads=2)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "read as llama and cohere" in str(found)
    assert headwise.verify(llama, other, config=LLAMA).verdict is Verdict.DIFFERENT


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weights": torch.nn.Linear(3, 2)}, "weights of type Linear"),
        ({"weights": {"a": torch.zeros(2), "epoch": 3}}, "the state dict with 'epoch', a int"),
        ({"config": object()}, "config of type object"),
        ({"heads": "6"}, "heads='6'"),
        ({"heads": True}, "heads=True"),
        ({"heads": 5}, "heads 5, where the config"),
        ({"reference": 3}, "weights of type int"),
        ({"against": 3}, "against of type int"),
        ({"against": {}}, "against of type dict"),
        ({"weights": {}}, "the state dict, which is empty"),
        ({"rotary_width": 99}, "rotary_width 99, in a head_dim of 8"),
        ({"rotary_width": 3}, "rotary_width 3, in a head_dim of 8"),
    ],
)
def test_what_is_refused(state: State, change: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said) as refused:
        headwise.detect(**{"weights": state, "config": CONFIG, **change})
    assert isinstance(refused.value, HeadwiseError)
    assert len(str(refused.value)) < 500


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"first_layout": 3}, "first_layout of type int"),
        ({"second_layout": ["llama"]}, "second_layout of type list"),
        ({"progress": 3}, "progress of type int"),
    ],
)
def test_what_verify_refuses(state: State, change: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        headwise.verify(state, state, config=CONFIG, **change)


def test_an_empty_state_dict_is_called_empty(state: State) -> None:
    with pytest.raises(OptionError, match="the second state dict, which is empty") as refused:
        headwise.verify(state, {}, config=CONFIG)
    assert "--" not in str(refused.value)


@pytest.mark.usefixtures("shapes_unchecked")
def test_counts_may_be_numpys(state: State) -> None:
    heads: Any = np.int64(6)
    assert headwise.detect(state, heads=heads) == headwise.detect(state, heads=6)


def test_a_rotary_width_that_is_given_is_not_called_the_configs(llama: State) -> None:
    found = headwise.detect(llama, heads=4, kv_heads=2, rotary_width=2)
    assert found.refuted["llama"] == "rotary_width: head_dim; the argument says 2 of 4"


def test_a_layer_is_compared_with_weights_in_any_layout() -> None:
    torch.manual_seed(0)
    layer = headwise.Attention(40, 5, num_kv_heads=1)
    stored = layer.state_dict()
    canonical = registry.layout("headwise").unpack(stored, heads=5, kv_heads=1)
    assert headwise.compare(layer, stored)
    assert headwise.compare(canonical, layer)
    canonical["wq"] = canonical["wq"][[1, 0, 2, 3, 4]]
    diagnosis = headwise.compare(layer, canonical)
    assert diagnosis.verdict is Verdict.DIFFERENT
    assert "heads permuted: heads in the order 1 0 2 3 4" in str(diagnosis)
    original = torch.nn.MultiheadAttention(40, 5)
    assert headwise.compare(original, original.state_dict())


def test_weights_are_not_compared_with_a_function() -> None:
    stored = headwise.Attention(40, 5).state_dict()
    with pytest.raises(OptionError, match="b as weights and the other as what runs") as error:
        headwise.compare(lambda x: x, stored)
    assert "b=headwise.Attention.from_layout(state, " in error.value.do
    with pytest.raises(OptionError, match="a as weights and the other as what runs") as error:
        headwise.compare("folder", lambda x: x)
    assert "a=headwise.checkpoints.load_attention(path, " in error.value.do


@pytest.mark.parametrize("kv_width", others_slow([48, 16], 16))
def test_weights_of_an_unknown_number_of_heads_are_told_apart(kv_width: int) -> None:
    """Some numbers of heads have an odd head_dim, which no interleaved rotation has."""
    generator = torch.Generator().manual_seed(0)
    right = {
        f"model.layers.{layer}.self_attn.{name}_proj.weight": torch.randn(
            rows, 48, generator=generator
        )
        for layer in range(2)
        for name, rows in (("q", 48), ("k", kv_width), ("v", kv_width), ("o", 48))
    }
    name = "model.layers.1.self_attn.o_proj.weight"
    found = headwise.verify({**right, name: right[name].mT.contiguous()}, right)
    assert [move.causes for move in found.moves] == [("square matrix transposed",)]
    assert str(found).endswith(
        f"Not the same: 7 of 8 tensors are equal; `{name}` differs (output projection)."
    )
