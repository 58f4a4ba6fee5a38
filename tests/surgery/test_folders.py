"""Cuts of stored models: the forms that a family has, and what plain transformers loads of it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headwise.errors import OptionError
from headwise.surgery import Cut, check_folder, cut_model, load, plan_folder, write
from tests.quick import others_extra, others_slow
from tests.surgery.families import FAMILIES, WIDTH_BOUND, inputs_of, output_of, whole, without

GONE = [2, 3]  # a group of the families with groups
families = pytest.mark.parametrize("family", others_slow(FAMILIES, "bert", "llama", "t5"))
LOADED_BY_PLAIN_TRANSFORMERS = """
import sys, torch, transformers
from safetensors.torch import load_file, save_file
for folder in sys.argv[1:]:
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0])
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        output = model.eval()(**load_file(folder + "/../inputs.safetensors"))[0]
    save_file({"output": output.contiguous()}, folder + "/../output.safetensors")
assert not any(name.startswith("headwise") for name in sys.modules)
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By family, a folder of a model without two heads in every layer, in its best plain form."""
    from safetensors.torch import save_file

    folders = {}
    for family, make in FAMILIES.items():
        model, folder = make(), tmp_path_factory.mktemp(family)
        model.save_pretrained(folder / "source")
        (folder / "source" / "tokenizer.json").write_text("{}")
        form: Any = "full" if family in WIDTH_BOUND else "plain"
        write(without(model, GONE), folder / "source", folder / "cut", form=form)
        save_file(inputs_of(model), folder / "inputs.safetensors")
        folders[family] = folder
    return folders


@pytest.fixture(scope="module")
def outputs(written: dict[str, Path]) -> dict[str, torch.Tensor]:
    """By family, what plain transformers computes from that folder, in a process of its own."""
    command = [sys.executable, "-c", LOADED_BY_PLAIN_TRANSFORMERS]
    command += [str(folder / "cut") for folder in written.values()]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-2000:]
    return {
        family: load_file(folder / "output.safetensors")["output"]
        for family, folder in written.items()
    }


@pytest.mark.slow
@families
def test_plain_transformers_gives_the_outputs_of_the_cut_in_memory(
    family: str, outputs: dict[str, torch.Tensor]
) -> None:
    stored, model = outputs[family], FAMILIES[family]()
    expected = output_of(cut_model(without(model, GONE), model))
    assert float((stored - output_of(model)).abs().max()) > 1e-3
    exact = output_of(cut_model(without(model, GONE), model).double()).double()
    honest = (expected - exact).abs().max()
    floor = torch.finfo(torch.float32).eps * exact.abs().max()
    assert float((stored - exact).abs().max()) <= 2 * float(honest) + float(floor)


@families
def test_a_folder_has_the_cut_and_the_small_files_of_its_source(
    family: str, written: dict[str, Path]
) -> None:
    source, made = written[family] / "source", written[family] / "cut"
    names = {path.name for path in source.iterdir()}
    assert {path.name for path in made.iterdir()} == names | {"cut.json"}
    assert Cut.load(made / "cut.json").gone == without(FAMILIES[family](), GONE).gone
    assert type(load(made)) is type(FAMILIES[family]())


@families
def test_what_no_config_states_is_refused_before_anything_is_written(
    family: str, written: dict[str, Path], tmp_path: Path
) -> None:
    source = written[family] / "source"
    layers = dict(without(FAMILIES[family](), GONE))
    other = next(reversed(layers))
    cut = Cut({other: layers[other]})  # one layer has other heads than the rest
    needed = "the same heads" if family == "t5" else "states one number for all layers"
    with pytest.raises(OptionError, match=needed):
        write(cut, source, tmp_path / "new", form="plain")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("family", WIDTH_BOUND)
def test_heads_of_a_fixed_width_have_the_other_forms(
    family: str, written: dict[str, Path], tmp_path: Path
) -> None:
    model, source = FAMILIES[family](), written[family] / "source"
    cut = without(model, GONE)
    with pytest.raises(
        OptionError, match=r"(?s)after the cut, \(\d+.*another form: \"full\".*\"code\""
    ):
        write(cut, source, tmp_path / "plain", form="plain")
    assert not any(tmp_path.iterdir())
    assert write(cut, source, tmp_path / "new", form="headwise").changes == {}
    with pytest.warns(UserWarning, match="nothing loads this folder"):
        load(tmp_path / "new").save_pretrained(tmp_path / "again")
    before = json.loads((source / "config.json").read_text("utf-8"))
    assert json.loads((tmp_path / "new" / "config.json").read_text("utf-8")) == before


@families
def test_layers_that_differ_come_back_in_the_form_of_headwise(
    family: str, written: dict[str, Path], tmp_path: Path
) -> None:
    model, source = FAMILIES[family](), written[family] / "source"
    layers = dict(without(model, GONE))
    if family != "t5":  # whose layers share a table of distances by head
        _ = layers.popitem()
    cut = Cut(layers)
    made = write(cut, source, tmp_path / "new", form="headwise")
    assert made.nbytes < made.nbytes_before
    loaded, expected = load(tmp_path / "new"), cut_model(cut, model)
    assert torch.equal(output_of(loaded), output_of(expected))
    names = {name: tuple(x.shape) for name, x in expected.state_dict().items()}
    assert {name: tuple(x.shape) for name, x in loaded.state_dict().items()} == names


def test_the_plan_counts_the_bytes_of_the_file(written: dict[str, Path]) -> None:
    plan = plan_folder(without(FAMILIES["llama"](), GONE), written["llama"] / "source")
    stored = load_file(written["llama"] / "cut" / "model.safetensors")
    assert plan.nbytes == sum(x.nbytes for x in stored.values())
    # 2 layers lose 2 heads and a kv head: q and o (2 heads), k and v (1), each 10 x 48 numbers
    assert plan.nbytes_before - plan.nbytes == 2 * (2 * 2 + 2 * 1) * 10 * 48 * 4
    assert "num_attention_heads 4, num_key_value_heads 2" in str(plan)
    assert str(plan).endswith("plain transformers loads the folder")


@pytest.mark.parametrize(
    ("family", "form"), others_extra([("bert", "headwise"), ("llama", "plain")])
)
def test_a_check_in_a_new_process(
    family: str, form: Any, written: dict[str, Path], tmp_path: Path
) -> None:
    model, source = FAMILIES[family](), written[family] / "source"
    cut = without(model, GONE)
    write(cut, source, tmp_path / "new", form=form)
    check_folder(tmp_path / "new", cut_model(cut, model), inputs_of(model))
    other = cut_model(without(model, [0, 1]), model)
    with pytest.raises(Exception, match="gives other outputs than the model in memory"):
        check_folder(tmp_path / "new", other, inputs_of(model))


def test_a_cut_that_does_nothing_writes_the_same_tensors(
    written: dict[str, Path], tmp_path: Path
) -> None:
    for family in ("vit", "gpt2"):
        source = written[family] / "source"
        write(whole(FAMILIES[family]()), source, tmp_path / family)
        before, after = (
            load_file(folder / "model.safetensors") for folder in (source, tmp_path / family)
        )
        assert before.keys() == after.keys()
        assert all(torch.equal(x, after[name]) for name, x in before.items())


@families
def test_reordered_heads_have_a_plain_form(
    family: str, written: dict[str, Path], tmp_path: Path
) -> None:
    model, source = FAMILIES[family](), written[family] / "source"
    cut = Cut({name: layer.keep([4, 5, 1, 0, 2, 3]) for name, layer in whole(model)})
    assert write(cut, source, tmp_path / "new").changes == {}
    loaded, info = type(model).from_pretrained(tmp_path / "new", output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(output_of(loaded.eval()), output_of(cut_model(cut, model)))


@families
def test_a_mean_in_the_bias_is_stored_where_the_class_has_one(
    family: str, written: dict[str, Path], tmp_path: Path
) -> None:
    model, source = FAMILIES[family](), written[family] / "source"
    mean = torch.linspace(-1, 1, 48)
    cut = Cut({name: layer.drop(GONE).shift(mean) for name, layer in whole(model)})
    expected = output_of(cut_model(cut, model))
    assert not torch.equal(expected, output_of(cut_model(without(model, GONE), model)))
    for form in ("full",) if family in WIDTH_BOUND else ("plain", "full"):
        if family in ("qwen2", "t5"):  # whose output projection has no bias
            with pytest.raises(OptionError):
                write(cut, source, tmp_path / form, form=form)
            assert not any(tmp_path.iterdir())
            continue
        made = write(cut, source, tmp_path / form, form=form)
        flag = "attention_bias" in json.loads((source / "config.json").read_text("utf-8"))
        assert made.changes.get("attention_bias", (None, None))[1] == (True if flag else None)
        assert torch.equal(output_of(load(tmp_path / form)), expected)
