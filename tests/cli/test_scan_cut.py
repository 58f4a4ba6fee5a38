"""``headwise scan`` of folders of cut models: heads have their original numbers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import headwise
from headwise.errors import CheckpointError, OptionError
from headwise.scanning import open_model
from headwise.scanning.labels import describe_cuts
from headwise.surgery import Cut, LayerCut, load, write
from tests.cli.scan_command import refused, run
from tests.surgery.families import FAMILIES, whole

pytestmark = pytest.mark.usefixtures("in_a_folder_of_its_own")

SHORT = ("--random-repeats", "--length", 16, "--stats", "entropy", "--json", "--force")
KEPT = ([4, 5, 0, 1], [2, 3, 0, 1])  # whole groups, other ones in each layer
EVERY = [4, 5, 2, 3, 0, 1]
IDS = torch.arange(3, 20)[None]


def write_cut(form: Any, change: Callable[[int, LayerCut], LayerCut]) -> Path:
    """Write a model and a cut of it."""
    model = FAMILIES["llama"](initializer_range=0.4)
    model.save_pretrained("source")
    layers = enumerate(whole(model))
    cut = Cut({name: change(number, layer) for number, (name, layer) in layers})
    return write(cut, "source", "smaller", form=form).folder


def keep(number: int, layer: LayerCut) -> LayerCut:
    return layer.keep(KEPT[number])


def scanned(folder: str | Path) -> list[dict[int, float]]:
    """The entropy of each head, by its number, of each layer."""
    heads = json.loads(run(folder, *SHORT)[0])["heads"]
    return [
        {head["head"]: head["entropy"] for head in heads if head["layer_index"] == layer}
        for layer in range(2)
    ]


@pytest.mark.slow
def test_a_smaller_model() -> None:
    write_cut("plain", keep)
    before, after = scanned("source"), scanned("smaller")
    assert [list(layer) for layer in after] == [*KEPT]
    # The first layer has the input that it had: head 4 attends as head 4 did.
    for head, entropy in after[0].items():
        assert entropy == pytest.approx(before[0][head], rel=1e-5)


def test_a_model_at_full_size() -> None:
    write_cut("full", lambda _, layer: layer.keep(EVERY).drop([0, 1]))
    before, after = scanned("source"), scanned("smaller")
    assert [list(layer) for layer in after] == [EVERY, EVERY]
    for head, entropy in after[0].items():
        assert entropy == pytest.approx(before[0][head], rel=1e-5)


def test_a_folder_that_was_cut_twice() -> None:
    write_cut("plain", keep)
    again = {name: layer.keep([0, 1]) for name, layer in whole(load("smaller"))}
    write(Cut(again), "smaller", "smallest")
    assert [list(layer) for layer in scanned("smallest")] == [[4, 5], [2, 3]]


@pytest.mark.parametrize("form", ["plain", "headwise"])
def test_heads_of_a_loaded_model_are_chosen_by_their_original_numbers(form: Any) -> None:
    folder = write_cut(form, keep)
    opened = [load(folder)] + ([open_model(folder).model] if form == "plain" else [])
    for model in opened:
        scan = headwise.scan(model, IDS, heads=[5, 0], layers="model.layers.0.*")
        assert [layer.heads for layer in scan.layer_scans] == [(5, 0)]
        with pytest.raises(OptionError, match="heads among 4, 5, 0, 1"):
            headwise.scan(model, IDS, heads=[2], layers="model.layers.0.*")


def test_a_folder_that_transformers_cannot_load_names_the_way() -> None:
    folder = write_cut("headwise", keep)
    error = refused(folder, *SHORT)
    assert "in the form headwise" in error.saw
    line = error.do.partition("inputs: ")[2]
    scan = eval(line, {"headwise": headwise, "inputs": IDS})
    assert [layer.heads for layer in scan.layer_scans] == [tuple(heads) for heads in KEPT]


@pytest.mark.parametrize("edit", ["text", "names", "left", "count"])
def test_a_record_of_another_model_is_refused(edit: str) -> None:
    file = write_cut("plain", keep) / "cut.json"
    values = json.loads(file.read_text())
    layer = values["layers"]["model.layers.0.self_attn."]
    if edit == "names":
        values["layers"]["model.layers.7.self_attn."] = layer
    if edit == "left":
        layer["left"] = ["five"]
    if edit == "count":
        del layer["heads"]
    file.write_text("none" if edit == "text" else json.dumps(values))
    error = refused("smaller", *SHORT)
    assert isinstance(error, CheckpointError)
    assert "cut.json, which is no record of this model's heads" in error.saw


def test_a_file_of_another_purpose_is_left_alone() -> None:
    FAMILIES["llama"]().save_pretrained("source")
    Path("source", "cut.json").write_text('{"film": "the last cut"}')
    assert [list(layer) for layer in scanned("source")] == [[*range(6)]] * 2


def test_a_comparison_says_that_a_folder_is_cut() -> None:
    folder = write_cut("full", keep)
    said = "is a cut model, as cut.json says: 8 of 12 heads of 2 layers are left; steps: "
    assert f"the first {said}" in str(headwise.verify(folder, "source"))
    [of_model] = describe_cuts("source", AutoModelForCausalLM.from_pretrained(folder))
    assert of_model.startswith(f"the second {said}")
    assert describe_cuts("source", {}) == ()
