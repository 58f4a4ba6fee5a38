"""headwise.detect and headwise.verify from Python: paths, state dicts, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import headwise
from headwise.errors import HeadwiseError, OptionError, UndecidedError
from headwise.layouts.canonical import State

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
    assert "`transformer.h.1.attn.` and `transformer.h.1.attn.`: OTHER OUTPUTS" in str(found)


def test_layouts_that_are_named(state: State) -> None:
    other = headwise.convert(state, "gpt2", "opt", heads=6)
    named: dict[str, Any] = {"first_layout": "gpt2", "second_layout": "opt"}
    found = headwise.verify(state, other, heads=6, **named)
    assert found, str(found)
    assert found.layouts is not None
    assert [one.name for one in found.layouts] == ["gpt2", "opt"]


def test_what_holds_no_attention_is_undecided(state: State) -> None:
    with pytest.raises(UndecidedError, match="the second state dict, which holds no attention"):
        headwise.verify(state, {"x": torch.zeros(3)}, config=CONFIG)


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
    ],
)
def test_what_is_refused(state: State, change: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said) as refused:
        headwise.detect(**{"weights": state, "config": CONFIG, **change})
    assert isinstance(refused.value, HeadwiseError)
    assert len(str(refused.value)) < 500
