"""A model out of a folder: what is read, what is refused, and that nobody is asked for anything."""

import json
import os
import random
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headwise.checkpoints.transformers import load, measure_model_bytes
from headwise.errors import CheckpointError, OptionError
from tests.huggingface.models import ENCODER, SEQUENCES
from tests.huggingface.stored import TEXT, bert, gpt2, masked_lm, stored


def changed_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text("utf-8")), **changes}
    kept = {name: value for name, value in config.items() if value is not None}
    path.write_text(json.dumps(kept), "utf-8")


# ---- what is read ------------------------------------------------------------------------------


def test_a_model_its_tokenizer_and_what_is_known_of_its_tokens(tmp_path: Path) -> None:
    found = load(stored(tmp_path, bert()))
    assert type(found.model).__name__ == "BertModel"
    assert not found.model.training
    assert (found.vocabulary, found.positions, found.start, found.notes) == (60, 40, None, ())
    assert found.tokenizer is not None
    assert found.begin == found.tokenizer.begin == 2
    assert found.tokenizer.separators == {"[SEP]": 3, ".": 10}
    assert sorted(found.tokenizer.specials) == [0, 1, 2, 3, 4]
    assert found.tokenizer.ids("the cat .") == [2, 5, 6, 10, 3]
    assert found.tokenizer.first_ids(TEXT, 5) == [2, 5, 6, 7, 3]
    assert found.tokenizer.token_text(6) == "cat"


def test_the_outputs_are_those_of_the_model_that_was_stored(tmp_path: Path) -> None:
    model = bert()
    found = load(stored(tmp_path, model))
    ids = torch.tensor([[2, 5, 6, 7, 3]])
    with torch.no_grad():
        assert torch.equal(
            found.model(**found.inputs(ids)).last_hidden_state, model(ids).last_hidden_state
        )


def test_nobody_is_asked_for_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError(f"a connection to {args[1:]}")

    folder = stored(tmp_path, bert())
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert load(folder).tokenizer is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_of_the_file_is_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    found = load(stored(tmp_path, bert().to(dtype)))
    assert {p.dtype for p in found.model.parameters()} == {dtype}


def test_the_class_that_the_configuration_names(tmp_path: Path) -> None:
    folder = stored(tmp_path, masked_lm())
    assert type(load(folder).model).__name__ == "BertForMaskedLM"
    # What is no model of transformers is not taken for one.
    changed_config(folder, architectures=["pipeline", "BertModel"])
    assert type(load(folder).model).__name__ == "BertModel"


def test_a_class_where_the_configuration_names_none(tmp_path: Path) -> None:
    for model, expected in ((gpt2(), "GPT2LMHeadModel"), (bert(), "BertModel")):
        folder = stored(tmp_path / expected, model)
        changed_config(folder, architectures=None)
        assert type(load(folder).model).__name__ == expected


def test_without_a_tokenizer(tmp_path: Path) -> None:
    found = load(stored(tmp_path, gpt2(), with_tokenizer=False))
    assert (found.tokenizer, found.positions, found.begin) == (None, 32, 1)


def test_positions_behind_the_padding_token(tmp_path: Path) -> None:
    config = transformers.RobertaConfig(**{**ENCODER, "max_position_embeddings": 40})
    config.pad_token_id = 1
    found = load(stored(tmp_path, transformers.RobertaModel(config), with_tokenizer=False))
    assert found.positions == 38


def test_a_decoder_reads_what_its_encoder_reads(tmp_path: Path) -> None:
    model = transformers.BartModel(transformers.BartConfig(**SEQUENCES))
    found = load(stored(tmp_path, model, with_tokenizer=False))
    given = found.inputs(torch.tensor([[7, 8, 9]]))
    assert given["decoder_input_ids"].tolist() == [[1, 7, 8]]


def test_weights_that_are_missing_are_noted(tmp_path: Path) -> None:
    folder = stored(tmp_path, bert())
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    del tensors["encoder.layer.1.attention.self.query.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    (note,) = load(folder).notes
    assert "lacks encoder.layer.1.attention.self.query.weight: these weights are random" in note


# ---- what is refused ---------------------------------------------------------------------------


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="nowhere does not exist"):
        load(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="is a file"):
        load(tmp_path / "file")


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"holds no config\.json: nothing"):
        measure_model_bytes(tmp_path)
    (tmp_path / "config.json").write_text("{}", "utf-8")
    with pytest.raises(OptionError, match=r"holds no weights: config\.json"):
        measure_model_bytes(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    assert measure_model_bytes(tmp_path) == 5


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_damaged_file(tmp_path: Path, name: str) -> None:
    folder = stored(tmp_path, bert())
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(OptionError, match=r"cannot be read|is no JSON"):
        load(folder)


class Harmful:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("harm",)


def test_a_pickle_that_holds_code(tmp_path: Path) -> None:
    folder = stored(tmp_path, bert())
    (folder / "model.safetensors").unlink()
    torch.save({"x": Harmful()}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"holds code .* and was not read") as refused:
        load(folder)
    assert "weights_only" not in str(refused.value)
    assert refused.value.__suppress_context__


def test_weights_of_another_size(tmp_path: Path) -> None:
    folder = stored(tmp_path, bert())
    changed_config(folder, intermediate_size=65)
    with pytest.raises(OptionError, match=r"bias is \(64,\) in the file and \(65,\) in"):
        load(folder)


def test_a_kind_that_nobody_knows(tmp_path: Path) -> None:
    folder = stored(tmp_path, bert())
    changed_config(folder, model_type="unheard_of", architectures=None)
    with pytest.raises(OptionError, match="unheard_of"):
        load(folder)


WRONG: tuple[Any, ...] = (0, -1, 0.5, float("nan"), True, "", "abc", [], [1, 2], [[[]]], {"a": 1})


def test_mutated_configs(tmp_path: Path) -> None:
    """transformers raises what it likes at a field of a wrong type; here it is one error."""
    stored(tmp_path, gpt2())
    path = tmp_path / "config.json"
    config = json.loads(path.read_text("utf-8"))
    every = [(name, value) for name in config for value in WRONG]
    chosen, refused = random.Random(0).sample(every, 60), 0
    for name, value in [*chosen, ("model_type", ["gpt2"]), ("architectures", [[1]])]:
        path.write_text(json.dumps({**config, name: value}), "utf-8")
        try:
            load(tmp_path)
        except OptionError:
            refused += 1
    assert refused > len(chosen) / 2


@pytest.mark.parametrize("text", ["[1]", "3", '"gpt2"', "{", "[" * 100_000, "\ufeff{}"])
def test_a_config_that_is_no_object(tmp_path: Path, text: str) -> None:
    stored(tmp_path, gpt2())
    (tmp_path / "config.json").write_text(text, "utf-8")
    with pytest.raises(OptionError, match=r"config\.json"):
        load(tmp_path)


def test_a_model_that_reads_no_tokens(tmp_path: Path) -> None:
    config = transformers.ViTConfig(
        hidden_size=48, num_hidden_layers=1, num_attention_heads=6, intermediate_size=64
    )
    folder = stored(tmp_path, transformers.ViTModel(config), with_tokenizer=False)
    with pytest.raises(OptionError, match="ViTModel takes pixel_values"):
        load(folder)


OWN_CODE = """
import pathlib
import transformers
pathlib.Path({marker!r}).touch()

class OwnConfig(transformers.BertConfig):
    model_type = "own"

class OwnModel(transformers.BertModel):
    config_class = OwnConfig
"""


def test_code_beside_the_weights_runs_only_where_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, marker = stored(tmp_path / "own", bert(), with_tokenizer=False), tmp_path / "it-ran"
    (folder / "own.py").write_text(OWN_CODE.format(marker=str(marker)), "utf-8")
    changed_config(
        folder,
        model_type="own",
        architectures=["OwnModel"],
        auto_map={"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"},
    )
    with pytest.raises(OptionError, match="trust_remote_code"):
        load(folder)
    assert not marker.exists()
    modules = tmp_path / "modules"
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(modules))
    monkeypatch.setattr(sys, "path", [*sys.path, str(modules)])
    found = load(folder, trust_remote_code=True)
    assert marker.exists()
    assert type(found.model).__name__ == "OwnModel"
