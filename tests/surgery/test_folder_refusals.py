"""Folders that are refused: damaged, quantised, adapted, of other versions; and wrong targets."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from headwise.errors import CheckpointError, OptionError
from headwise.surgery import Cut, LayerCut, cut_model, full_size, load, write
from tests.checkpoints.test_resuming import files_of_the_next, wait_until
from tests.surgery.families import FAMILIES, inputs_of, output_budget, output_of, whole, without

O_PROJ = "model.layers.1.self_attn.o_proj.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in two files, and its cut of layers that differ."""
    folder, model = tmp_path_factory.mktemp("llama"), FAMILIES["llama"]()
    model.save_pretrained(folder / "source", max_shard_size="100KB")
    (folder / "source" / "1_Pooling").mkdir()
    (folder / "source" / "1_Pooling" / "config.json").write_text("{}")
    write(cut_of_one_layer(model), folder / "source", folder / "cut", form="headwise")
    return folder


def cut_of_one_layer(model: Any) -> Cut:
    layers = dict(without(model, [2, 3]))
    _ = layers.popitem()
    return Cut(layers)


def test_a_folder_of_several_files(folders: Path) -> None:
    index = json.loads((folders / "cut" / "model.safetensors.index.json").read_text("utf-8"))
    files = {*index["weight_map"].values()}
    assert len(files) > 1
    assert index["metadata"]["total_size"] == sum(
        x.nbytes for file in files for x in load_file(folders / "cut" / file).values()
    )
    assert (folders / "cut" / "1_Pooling" / "config.json").is_file()
    model = FAMILIES["llama"]()
    made = cut_model(cut_of_one_layer(model), model)
    assert torch.equal(output_of(load(folders / "cut")), output_of(made))


def test_an_interrupted_write_goes_on(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, source = cut_of_one_layer(FAMILIES["llama"]()), folders / "source"

    def stop_in_the_second(file: str, *_: int) -> None:
        if file.startswith("model-00002"):
            [manifest] = tmp_path.glob(".*.headwise-part/manifest")
            wait_until(lambda: manifest.read_bytes().count(b"\n") == 2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(cut, source, tmp_path / "new", form="headwise", progress=stop_in_the_second)
    assert [path.name for path in tmp_path.iterdir()] == [".new.headwise-part"]
    written = files_of_the_next(monkeypatch)
    write(cut, source, tmp_path / "new", form="headwise")
    assert written == ["model-00002-of-00002.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    for path in (folders / "cut").glob("*.*"):
        assert (tmp_path / "new" / path.name).read_bytes() == path.read_bytes()
    # The files of another cut are begun anew.
    with pytest.raises(KeyboardInterrupt):
        write(cut, source, tmp_path / "other", form="headwise", progress=stop_in_the_second)
    written.clear()
    write(whole(FAMILIES["llama"]()), source, tmp_path / "other", form="headwise")
    assert len(written) == 2


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of the file that holds one of the attention, and the index."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text("utf-8"))
    file = folder / index["weight_map"][O_PROJ]
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata)
    kept = {name: name_of for name, name_of in index["weight_map"].items() if name_of != file.name}
    index["weight_map"] = kept | dict.fromkeys(tensors, file.name)
    path.write_text(json.dumps(index), "utf-8")


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), "utf-8")


def _half(tensors: dict[str, torch.Tensor]) -> None:
    tensors[O_PROJ] = tensors[O_PROJ][:, :20].contiguous()


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda f: edit(f, lambda t: t.pop(O_PROJ)), O_PROJ),
    "unexpected": (
        lambda f: edit(f, lambda t: t.update({"model.more": torch.ones(3)})),
        "no place for model.more",
    ),
    "other sizes": (lambda f: edit(f, _half), O_PROJ),
    "version": (lambda f: edit_json(f / "cut.json", format=9), "has the format 9, not 1"),
    "no record": (lambda f: (f / "cut.json").unlink(), r"without cut\.json"),
    "quantised": (
        lambda f: edit_json(f / "config.json", quantization_config={"quant_method": "gptq"}),
        "quantised weights",
    ),
    "another cut": (
        lambda f: Cut({"model.layers.0.self_attn.": LayerCut(6, 3).drop([0, 1, 2, 3])}).save(
            f / "cut.json"
        ),
        r"model\.layers\.0\.self_attn\. do not fit cut\.json",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_folders_are_not_loaded(name: str, folders: Path, tmp_path: Path) -> None:
    damage, saw = DAMAGED[name]
    shutil.copytree(folders / "cut", tmp_path / "cut")
    damage(tmp_path / "cut")
    with pytest.raises((CheckpointError, OptionError), match=saw):
        load(tmp_path / "cut")


def test_other_folders_are_not_loaded(folders: Path) -> None:
    with pytest.raises(CheckpointError, match="without the headwise-surgery of its weights"):
        load(folders / "source")


SOURCES: dict[str, tuple[Callable[[Path], object], str]] = {
    "adapter": (lambda f: (f / "adapter_config.json").write_text("{}"), "holds an adapter"),
    "quantised": (
        lambda f: edit_json(f / "config.json", quantization_config={"quant_method": "gptq"}),
        "quantised weights",
    ),
    "missing": (
        lambda f: edit(f, lambda t: [t.pop(n) for n in [*t] if "layers.1.self_attn" in n]),
        r"no weights for model\.layers\.1\.self_attn\.",
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_sources_that_are_refused(name: str, folders: Path, tmp_path: Path) -> None:
    damage, saw = SOURCES[name]
    shutil.copytree(folders / "source", tmp_path / "source")
    damage(tmp_path / "source")
    with pytest.raises((CheckpointError, OptionError), match=saw):
        write(whole(FAMILIES["llama"]()), tmp_path / "source", tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_target_is_new_and_outside(folders: Path, tmp_path: Path) -> None:
    cut, source = whole(FAMILIES["llama"]()), folders / "source"
    (tmp_path / "new").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        write(cut, source, tmp_path / "new")
    with pytest.raises(CheckpointError, match="within the source"):
        write(cut, source, source / "new")
    with pytest.raises(OptionError, match="form='small'"):
        write(cut, source, tmp_path / "other", form="small")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="cut in the form of headwise"):
        write(cut, folders / "cut", tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert not (source / "new").exists()


def test_a_full_disk_leaves_nothing(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headwise.checkpoints.staging.PartialFile.append_range", full)
    with pytest.raises(CheckpointError, match="No space left"):
        write(whole(FAMILIES["llama"]()), folders / "source", tmp_path / "new")
    assert not any(tmp_path.iterdir())


def test_a_cut_of_a_cut_is_recorded_by_the_original_numbers(folders: Path, tmp_path: Path) -> None:
    model = FAMILIES["llama"]()
    write(without(model, [0, 1]), folders / "source", tmp_path / "one")
    again = Cut({name: LayerCut(4, 2).drop([2, 3]) for name in whole(model).layers})
    write(again, tmp_path / "one", tmp_path / "two")
    assert {*map(tuple, Cut.load(tmp_path / "two" / "cut.json").gone.values())} == {(0, 1, 4, 5)}
    expected = cut_model(without(model, [0, 1, 4, 5]), model)
    assert torch.equal(output_of(load(tmp_path / "two")), output_of(expected))


def test_a_wrong_order_of_heads_is_seen(folders: Path, tmp_path: Path) -> None:
    """The kv heads are permuted, and their query heads are not."""
    model = FAMILIES["llama"]()
    cut = Cut({name: layer.drop([0, 1]) for name, layer in whole(model)})
    write(cut, folders / "source", tmp_path / "new")
    budget = output_budget(cut_model(cut, model), inputs_of(model))
    budget.assert_holds(output_of(load(tmp_path / "new")))
    wrong = load(tmp_path / "new")
    with torch.no_grad():
        for layer in wrong.model.layers:
            for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                linear.weight.copy_(linear.weight.unflatten(0, (2, 10)).flip(0).flatten(0, 1))
    assert not budget.check(output_of(wrong))


# Every channel differs: a norm that follows takes away what all channels share.
FITTED = torch.randn(4, 8, 48, generator=torch.Generator().manual_seed(3)) / 5


@pytest.mark.parametrize(
    "cut",
    [
        lambda layer: layer.merge(3),
        lambda layer: layer.keep([4, 5, 0, 1, 2, 3]).merge(3).zero([1]),
        lambda layer: layer.keep([5, 0, 1]).zero([1]).keep([2, 0]),
        lambda layer: layer.drop([2]).shift(torch.linspace(-1, 1, 48)),
        lambda layer: layer.drop([0, 3]).refit(FITTED, FITTED[0, 0]),
    ],
    ids=["merge", "order, merge", "twice", "mean", "refit"],
)
def test_a_cut_at_full_size_gives_its_outputs(cut: Callable[[LayerCut], LayerCut]) -> None:
    model = FAMILIES["bert"]().double()
    made = Cut({name: cut(layer) for name, layer in whole(model)})
    full = full_size(made)
    assert full.gone == made.gone
    sizes = {(len(x.origins.query), len(x.origins.kv)) for x in full.layers.values()}
    assert sizes == {(6, 6)}
    budget = output_budget(cut_model(made, model), inputs_of(model))
    budget.assert_holds(output_of(cut_model(full, model)))
    assert not budget.check(output_of(model))


def test_what_no_full_size_holds_is_refused() -> None:
    with pytest.raises(OptionError, match="a merge after heads were taken out"):
        full_size(Cut({"a.": LayerCut(6, 6).drop([0, 1]).merge(2)}))
    with pytest.raises(OptionError, match="6 kv heads, where the model has 3"):
        full_size(Cut({"a.": LayerCut(6, 3).expand(6)}))


def test_weights_that_are_divided_are_to_be_gathered() -> None:
    """A parameter of FSDP is a DTensor."""
    model = FAMILIES["bert"]()
    model.embeddings.word_embeddings.weight.full_tensor = None
    with pytest.raises(OptionError, match=r"divided among processes(.|\n)*full_state_dict=True"):
        cut_model(Cut({}), model)


def test_outputs_that_are_not_finite_are_not_compared(tmp_path: Path) -> None:
    model = FAMILIES["bert"]()
    model.encoder.layer[1].attention.self.query.weight.data[3, 4] = torch.nan
    model.save_pretrained(tmp_path / "source")
    cut, given = without(model, [0]), inputs_of(model)
    with pytest.raises(OptionError, match="not finite"):
        write(cut, tmp_path / "source", tmp_path / "new", inputs=given)


def test_a_head_dim_that_the_config_computes_is_not_stated(tmp_path: Path) -> None:
    sizes = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 6, "num_kv_heads": 3}
    config = transformers.FalconConfig(**sizes, vocab_size=97, new_decoder_architecture=True)
    model = transformers.FalconForCausalLM(config)
    model.save_pretrained(tmp_path / "source")
    with pytest.raises(OptionError, match=r"dense.weight: \(48, 32\) after the cut"):
        write(without(model, [0, 1]), tmp_path / "source", tmp_path / "new", form="plain")
