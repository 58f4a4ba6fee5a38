"""A model of weights that describe themselves gives what the model gives that they were made of."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headwise.checkpoints.transformers import load, measure_model_bytes, open_described_model
from headwise.cli.convert import convert
from headwise.errors import CheckpointError, OptionError
from tests.checkpoints.test_description import metadata
from tests.checkpoints.test_model_args import GPT, ckpt
from tests.checkpoints.test_write_meta_llama_files import model as llama
from tests.cli import scan_command
from tests.cli.alone import Alone
from tests.huggingface.stored import bert, gpt2, stored

COMMAND = Alone(convert)
IDS = torch.tensor([[2, 5, 6, 7, 3, 9, 9, 1]])


def logits(path: Path) -> torch.Tensor:
    found = load(path)
    assert found.notes == ()
    with torch.no_grad():
        return found.model.double()(**found.inputs(IDS))[0]


def moved(folder: Path, target: Path, name: str, *more: object) -> Path:
    COMMAND.run(folder, target, "--to", name, *more)
    return target


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda folder: stored(folder, bert()), "flax-bert"),
        (lambda folder: stored(folder, gpt2(), with_tokenizer=False), "nanogpt"),
        (lambda folder: llama(folder) and folder, "llama-meta"),
    ],
    ids=["bert", "gpt2", "llama"],
)
def test_a_converted_folder_is_the_model_that_it_was_made_of(
    make: Any, name: str, tmp_path: Path
) -> None:
    folder = make(tmp_path / "a")
    expected = logits(folder)
    target = moved(folder, tmp_path / "b", name)
    assert torch.equal(logits(target), expected)
    size = sum(x.nbytes for x in load_file(target / "model.safetensors").values())
    assert measure_model_bytes(target) == 2 * size
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert torch.equal(logits(target), expected)
    # There and back it is a folder of transformers again, with the config of the metadata.
    (target / "config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    back = moved(target, tmp_path / "c", config["model_type"])
    public = {name: value for name, value in config.items() if not name.startswith("_")}
    assert json.loads((back / "config.json").read_text()) == public
    assert open_described_model(back) is None
    assert torch.equal(logits(back), expected)


def test_metas_files_are_the_model_that_they_were_made_of(tmp_path: Path) -> None:
    llama(tmp_path / "a")
    target = moved(tmp_path / "a", tmp_path / "b", "llama-meta", "--as", "meta")
    assert torch.equal(logits(target), logits(tmp_path / "a"))
    # transformers would not find weights of this name, so no config.json lies beside them.
    back = moved(target, tmp_path / "c", "llama")
    assert [path.name for path in back.iterdir()] == ["consolidated.00.safetensors"]


def forward(model: GPT, ids: torch.Tensor) -> torch.Tensor:
    """nanoGPT's forward pass, model.py."""
    parts = model.transformer
    x = parts["wte"](ids) + parts["wpe"](torch.arange(ids.shape[1]))
    for block in parts["h"]:
        x = x + block["attn"](block["ln_1"](x))
        hidden = torch.nn.functional.gelu(block["mlp"]["c_fc"](block["ln_2"](x)))
        x = x + block["mlp"]["c_proj"](hidden)
    return model.lm_head(parts["ln_f"](x))


def test_a_ckpt_of_nanogpt_is_a_gpt2_without_biases(tmp_path: Path) -> None:
    model = ckpt(tmp_path / "ckpt.pt")
    with torch.no_grad():
        expected = forward(model.double(), IDS)
    torch.testing.assert_close(logits(tmp_path / "ckpt.pt"), expected, rtol=1e-6, atol=1e-6)


def test_scan_reads_what_convert_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = stored(tmp_path / "a", bert(), with_tokenizer=False)
    options = ("--random-repeats", "--length", 24, "--stats", "entropy", "--json")
    entropies = []
    for place in (folder, moved(folder, tmp_path / "b", "torch-packed")):
        out, _ = scan_command.run(place, *options, "--page", tmp_path / f"{place.name}.html")
        entropies.append(json.loads(out)["heads"])
    assert entropies[0] == entropies[1]
    assert len(entropies[0]) > 1


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    state = {f"w{n}": torch.randn(4, 6, 24) for n in "qkv"} | {"wo": torch.randn(24, 24)}
    save_file(state, tmp_path / "a.safetensors")
    with pytest.raises(OptionError, match="is a file"):
        load(tmp_path / "a.safetensors")
    moved(
        tmp_path / "a.safetensors", tmp_path / "b.safetensors", "torch-packed", "--from", "per-head"
    )
    with pytest.raises(OptionError, match="in the layout torch-packed and no model_type"):
        load(tmp_path / "b.safetensors")


def test_a_folder_whose_weights_do_not_fit_their_description(tmp_path: Path) -> None:
    folder = stored(tmp_path / "a", gpt2(), with_tokenizer=False)
    target = moved(folder, tmp_path / "b", "nanogpt")
    (file,) = target.glob("*.safetensors")
    state = load_file(file)
    del state["transformer.h.1.attn.c_attn.weight"]
    save_file(state, file, metadata=metadata(file))
    with pytest.raises(CheckpointError, match="describes 2 modules of nanogpt, but"):
        load(target)


def test_other_files_beside_a_model_are_left_alone(tmp_path: Path) -> None:
    folder = stored(tmp_path / "a", bert())
    (folder / "broken.safetensors").write_bytes(os.urandom(40))
    assert open_described_model(folder) is None
    assert isinstance(load(folder).model, transformers.BertModel)
