"""``headwise convert``: what it prints, what it reads from the config, and what it refuses."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from headwise.checkpoints import conversion
from headwise.cli.convert import convert
from headwise.cli.output import USAGE
from headwise.errors import CheckpointError, OptionError
from headwise.layouts.registry import layout
from tests.checkpoints import llamas
from tests.cli.alone import Alone
from tests.identify.test_detect import file_of
from tests.layouts.examples import known_of

CONVERT = Alone(convert)
invoke, run, refused = CONVERT.invoke, CONVERT.run, CONVERT.refused


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return llamas.in_files(tmp_path / "a")


def test_what_it_prints_and_writes(folder: Path, tmp_path: Path) -> None:
    out, err = run(folder, tmp_path / "b", "--to", "llama-meta")
    *lines, time, target = out.splitlines()
    assert lines == [
        "21 tensors: 4 rewritten, moved back and compared byte for byte; 17 copied.",
        "Attention is stored under names such as layers.0.attention.wk.weight.",
        "Read with heads 6, kv_heads 2, head_dim 10 (config.json).",
        "Not copied, since they go with llama: config.json.",
    ]
    assert re.fullmatch(r"\d+\.\d s, \d+ kB\. The weights:", time)
    assert target == str(tmp_path / "b")
    assert f"{folder}: llama -> llama-meta" in err
    expected = llamas.in_metas(llamas.weights())
    llamas.assert_same(llamas.read(tmp_path / "b"), expected)


def test_counts_and_layouts_that_are_given(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "b", "--from", "llama", "--to", "llama-meta")
    counts = ("--heads", 6, "--kv-heads", 2)
    out, _ = run(tmp_path / "b", tmp_path / "c", "--from", "llama-meta", "--to", "llama", *counts)
    assert "Not copied" not in out
    assert "Read with heads 6, kv_heads 2 (given), head_dim 10 (metadata)." in out.splitlines()
    llamas.assert_same(llamas.read(tmp_path / "c"), llamas.weights())


def test_a_root_that_is_given(folder: Path, tmp_path: Path) -> None:
    out, _ = run(folder, tmp_path / "b", "--to", "llama-meta", "--root", "text.")
    assert "The names begin with 'text.', which --root can change." in out.splitlines()
    assert "names such as text.layers.0.attention.wk.weight." in out
    expected = {f"text.{n}": x for n, x in llamas.in_metas(llamas.weights()).items()}
    llamas.assert_same(llamas.read(tmp_path / "b"), expected)


def test_folders_that_are_made_on_the_way_are_named(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "new" / "newer" / "b"
    out, _ = run(folder, target, "--to", "llama-meta")
    assert f"The folder {target.parent} was not there and was made." in out.splitlines()
    out, _ = run(folder, target.with_name("c"), "--to", "llama-meta")
    assert "was made" not in out


def test_many_files_that_are_not_copied(folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "merges.txt", "vocab.json"):
        (folder / name).touch()
    out, _ = run(folder, tmp_path / "b", "--to", "llama-meta")
    assert "go with llama: config.json, merges.txt, tokenizer.json and 1 more." in out


def test_a_run_that_was_interrupted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    command = (folder, tmp_path / "b", "--to", "llama-meta")
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_complete_files", stop)
        done = invoke(*command)
    assert done.exit_code
    begun = tmp_path / ".b.headwise-part"
    assert f"Partial output is in {begun}. Repeat the command to resume." in done.stderr
    assert begun.is_dir()
    assert run(*command)[0].splitlines()[0] == (
        "Resumed an interrupted run: the files it had finished were kept."
    )
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_complete_files", stop)
        invoke(folder, tmp_path / "c", "--to", "llama-meta")
    os.utime(folder / "model-00001-of-00003.safetensors", ns=(1, 1))
    assert run(folder, tmp_path / "c", "--to", "llama-meta")[0].splitlines()[0] == (
        "Started anew: the interrupted run had another source, options or version."
    )


@pytest.mark.parametrize(
    ("options", "saw"),
    [
        (("--to", "lama"), "no layout is named 'lama'"),
        (("--from", "lama", "--to", "llama"), "no layout is named 'lama'"),
        (("--to", "llama-meta", "--heads", 3), "heads 3, where the config in "),
        (("--to", "llama-meta", "--kv-heads", 0), "kv_heads 0"),
        (("--to", "llama-meta", "--accept", "pairing"), "accept pairing"),
        (("--to", "gpt2"), "llama and gpt2 use the same weights differently"),
    ],
)
def test_options_that_are_refused(
    folder: Path, tmp_path: Path, options: tuple[object, ...], saw: str
) -> None:
    error = refused(folder, tmp_path / "b", *options)
    assert isinstance(error, OptionError)
    assert saw in error.saw
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("config", ["{", '{"num_attention_heads": -6}'])
def test_a_config_that_says_nothing_of_use(folder: Path, tmp_path: Path, config: str) -> None:
    (folder / "config.json").write_text(config)
    refused(folder, tmp_path / "b", "--from", "llama", "--to", "llama-meta")
    assert os.listdir(tmp_path) == ["a"]


def test_no_config_and_no_counts(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").unlink()
    error = refused(folder, tmp_path / "b", "--from", "llama", "--to", "llama-meta")
    assert "heads" in error.needed
    assert error.do.startswith("give --kv-heads, ")
    assert error.do.endswith("which config.json calls num_key_value_heads")
    assert os.listdir(tmp_path) == ["a"]


def test_a_layout_that_the_files_leave_open(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["model_type"]
    (folder / "config.json").write_text(json.dumps(config))
    error = refused(folder, tmp_path / "b", "--to", "llama-meta")
    assert "--from" in error.do
    assert error.saw.startswith(f"{folder}, which may be in ")


def test_a_layout_that_the_config_contradicts(folder: Path, tmp_path: Path) -> None:
    error = refused(folder, tmp_path / "b", "--from", "cohere", "--to", "llama-meta")
    assert isinstance(error, OptionError)
    assert error.saw == f"--from cohere, where in {folder} the config says llama"
    assert os.listdir(tmp_path) == ["a"]
    # The same map, with another config that says nothing of its names.
    run(folder, tmp_path / "b", "--to", "llama-meta")
    shutil.copy(folder / "config.json", tmp_path / "b")
    run(tmp_path / "b", tmp_path / "c", "--from", "llama-meta", "--to", "llama")


def test_counts_that_fit_no_layout(tmp_path: Path) -> None:
    save_file(llamas.weights(), tmp_path / "a.safetensors")
    counts = ("--heads", 7, "--kv-heads", 2)
    error = refused(tmp_path / "a.safetensors", tmp_path / "b", "--to", "neox", *counts)
    assert error.saw == "heads 7, kv_heads 2"
    assert "its names are those of " in error.needed
    assert "llama" in error.needed


def test_unchanged_names_are_listed(folder: Path, tmp_path: Path) -> None:
    out, _ = run(folder, tmp_path / "c", "--to", "cohere")
    (line,) = [line for line in out.splitlines() if line.startswith("Names as before")]
    assert line == (
        "Names as before, since the layout cohere does not describe these tensors (13): "
        "model.embed_tokens.weight, "
        "model.layers.{n}.mlp.gate_proj.weight, model.layers.{n}.mlp.up_proj.weight, "
        "model.layers.{n}.input_layernorm.weight ..."
    )


def test_files_that_fit_the_result_as_well(folder: Path, tmp_path: Path) -> None:
    (folder / "generation_config.json").write_text("{}")
    out, _ = run(folder, tmp_path / "b", "--to", "llama", "--root", "text.")
    assert "Not copied, though they fit as well: generation_config.json." in out.splitlines()
    written = json.loads((tmp_path / "b" / "config.json").read_text())
    assert written == json.loads((folder / "config.json").read_text())


def test_a_function_that_differs_and_is_accepted(folder: Path, tmp_path: Path) -> None:
    error = refused(folder, tmp_path / "b", "--to", "maxtext")
    assert error.do.endswith("and pass --accept scale")
    out, _ = run(folder, tmp_path / "b", "--to", "maxtext", "--accept", "scale")
    assert "Accepted: scale, 1/sqrt(head_dim) in llama, 1 in maxtext." in out.splitlines()


def test_a_file_without_attention(tmp_path: Path) -> None:
    place = tmp_path / "b.safetensors"
    save_file({"x": llamas.weights()["lm_head.weight"]}, place)
    error = refused(place, tmp_path / "c.safetensors", "--to", "llama")
    assert error.saw == f"{place}, which contains no attention layer of a known layout"
    assert "undecidable" not in error.needed


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    error = refused(tmp_path / "missing", tmp_path / "b", "--to", "llama")
    assert isinstance(error, CheckpointError)
    assert "does not exist" in error.saw


@pytest.mark.slow
def test_the_command_ends_in_three_lines_and_status_2(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headwise", "convert", str(tmp_path), "b", "--to", "llama"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == USAGE
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert lines[0] == f"headwise: {tmp_path} holds no weights: nothing"
    assert [line.split()[0] for line in lines[1:]] == ["needed:", "do:"]


def chained(place: Path, *names: str) -> Path:
    """The last of files that were converted one from the other, by the command alone."""
    for number, name in enumerate(names):
        target = place.with_name(f"{number}.safetensors")
        run(place, target, "--to", name)
        place = target
    return place


@pytest.mark.parametrize(
    ("first", "others"),
    {
        "llama": ("llama-meta", "vllm", "headwise"),
        "gpt2": ("nanogpt", "headwise", "annotated"),
        "torch-packed": ("headwise", "gpt2", "per-head"),
    }.items(),
)
def test_only_the_first_layout_and_counts_are_given(
    first: str, others: tuple[str, ...], tmp_path: Path
) -> None:
    state, _ = file_of(layout(first), layers=1)
    # One layer, by its names within itself; and nothing that one of the others has no place for.
    state = {n.partition("attn.")[2]: x for n, x in state.items() if "bias_" not in n}
    if first == "llama":
        state = {n: x for n, x in state.items() if not n.endswith("bias")}
    save_file(state, tmp_path / "a.safetensors")
    counts = known_of(layout(first))
    options = ("--from", first, "--heads", counts["heads"], "--kv-heads", counts["kv_heads"])
    begun = tmp_path / "begun.safetensors"
    run(tmp_path / "a.safetensors", begun, "--to", others[0], *options)
    last = chained(begun, *others[1:], first)
    llamas.assert_same(llamas.read(last), state)


def test_options_that_contradict_the_metadata(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "b", "--to", "llama-meta")
    out, err = run(tmp_path / "b", tmp_path / "c", "--to", "llama")
    assert "Read with heads 6, kv_heads 2, head_dim 10 (metadata)." in out.splitlines()
    assert f"{tmp_path / 'b'}: llama-meta -> llama" in err
    llamas.assert_same(llamas.read(tmp_path / "c"), llamas.weights())
    error = refused(tmp_path / "b", tmp_path / "d", "--to", "llama", "--heads", 3)
    place = tmp_path / "b" / "model-00001-of-00003.safetensors"
    assert error.saw == f"heads 3, where the metadata of {place} says 6"
    assert error.do.startswith("leave out --heads")
    error = refused(tmp_path / "b", tmp_path / "d", "--from", "llama", "--to", "vllm")
    assert error.saw == f"--from llama, where in {tmp_path / 'b'} the metadata says llama-meta"
    error = refused(tmp_path / "c", tmp_path / "d", "--from", "cohere", "--to", "llama-meta")
    assert error.saw == f"--from cohere, where in {tmp_path / 'c'} the metadata says llama"


@pytest.mark.parametrize("given", [(), ("--from", "llama")], ids=["detected", "named"])
def test_a_layer_that_the_config_counts_and_the_files_lack(
    folder: Path, tmp_path: Path, given: tuple[str, ...]
) -> None:
    for file in folder.glob("*.safetensors"):
        kept = {name: x for name, x in load_file(file).items() if "layers.1." not in name}
        save_file(kept, file, metadata={"format": "pt"})
    folder.joinpath(llamas.INDEX).unlink()
    config = json.loads(folder.joinpath("config.json").read_text())
    folder.joinpath("config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    error = refused(folder, tmp_path / "b", *given, "--to", "llama-meta")
    assert isinstance(error, CheckpointError)
    assert "`model.layers.1` is missing: the config says 2 layers" in str(error)
    assert not (tmp_path / "b").exists()
