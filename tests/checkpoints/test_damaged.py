"""Files that are damaged, or no checkpoint: refused in three lines, before anything is written."""

import json
import os
import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headwise.checkpoints.source import open_source, read_index
from headwise.errors import CheckpointError
from tests.checkpoints import llamas

Head = dict[str, Any]


def refused(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as error:
        open_source(path)
    assert len(str(error.value).splitlines()) == 3
    return error.value


def small(path: Path) -> Path:
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4)}, path)
    return path


def with_head(path: Path, change: Callable[[Head], Any]) -> Path:
    """The file with its JSON changed: in place, or to what the change returns."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    head = json.loads(raw[8 : 8 + length])
    changed = change(head)
    text = changed if isinstance(changed, bytes) else json.dumps(changed or head).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    return path


def twice(head: Head) -> bytes:
    return json.dumps(head)[:-1].encode() + b', "a": ' + json.dumps(head["a"]).encode() + b"}"


def deep(_: Head) -> bytes:
    return b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


LIBRARY = "deserializing header"  # of the safetensors library
DAMAGE: dict[str, tuple[Callable[[Head], Any], str]] = {
    "no JSON": (lambda h: b"{" + b"x" * 40, LIBRARY),
    "no UTF-8": (lambda h: b'{"\xff": 1}', LIBRARY),
    "not an object": (lambda h: b"[1, 2]", LIBRARY),
    "deeper than a reader goes": (deep, LIBRARY),
    "a name twice": (twice, "'a' occurs twice"),
    "a dtype that torch lacks": (
        lambda h: h["b"].update(dtype="F4", shape=[64]),
        "F4.*BOOL",
    ),
    "an unknown field": (lambda h: h["a"].update(strides=[1]), "data_offsets, dtype, shape, str"),
    "a missing field": (lambda h: h["a"].pop("shape") and h, LIBRARY),
    "an unknown dtype": (lambda h: h["a"].update(dtype="F128"), LIBRARY),
    "a dtype that is none": (lambda h: h["a"].update(dtype=["F32"]), LIBRARY),
    "another width": (lambda h: h["a"].update(dtype="F64"), LIBRARY),
    "another shape": (lambda h: h["a"].update(shape=[2, 4]), LIBRARY),
    "a smaller shape": (lambda h: h["a"].update(shape=[2, 2]), LIBRARY),
    "a negative shape": (lambda h: h["a"].update(shape=[-2, -3]), LIBRARY),
    "a shape of fractions": (lambda h: h["a"].update(shape=[2.0, 3.0]), LIBRARY),
    "a shape of truths": (lambda h: h["a"].update(shape=[True, 6]), LIBRARY),
    "a shape beyond memory": (lambda h: h["a"].update(shape=[2**62, 2**62]), LIBRARY),
    "three offsets": (lambda h: h["a"].update(data_offsets=[0, 24, 24]), LIBRARY),
    "offsets that run back": (lambda h: h["a"].update(data_offsets=[24, 0]), LIBRARY),
    "metadata of numbers": (lambda h: h.update(__metadata__={"a": 1}), LIBRARY),
    "metadata that is a list": (lambda h: h.update(__metadata__=["a"]), LIBRARY),
    "a lone half of a letter": (lambda h: h.update({"\ud800": h.pop("a")}), LIBRARY),
    "minus zero": (
        lambda h: json.dumps(h).encode().replace(b"[0,", b"[-0,"),
        LIBRARY,
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_heads(tmp_path: Path, name: str) -> None:
    change, why = DAMAGE[name]
    error = refused(with_head(small(tmp_path / "a.safetensors"), change))
    assert "a.safetensors" in error.saw
    assert re.search(why, error.saw), error.saw


def moved(by: int, *names: str) -> Callable[[Head], None]:
    def change(head: Head) -> None:
        for name in names:
            head[name]["data_offsets"] = [at + by for at in head[name]["data_offsets"]]

    return change


def test_bytes_between_and_behind(tmp_path: Path) -> None:
    offsets = {n: tuple(h["data_offsets"]) for n, h in _head(small(tmp_path / "a")).items()}
    first, last = sorted(offsets, key=offsets.__getitem__)
    path = tmp_path / "b.safetensors"
    for change in (moved(8, last), moved(-8, last), moved(8, first, last)):
        assert LIBRARY in refused(with_head(small(path), change)).saw
    assert LIBRARY in refused(with_head(small(path), lambda h: h.pop(last) and h)).saw


def _head(path: Path) -> Head:
    raw = path.read_bytes()
    found: Head = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return found


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 9, 60, -1])
def test_cut_off(tmp_path: Path, kept: int) -> None:
    path = small(tmp_path / "a.safetensors")
    path.write_bytes(path.read_bytes()[:kept])
    assert str(path) in refused(path).saw


@pytest.mark.parametrize("length", [0, 1, 10**6, 2**63, 2**64 - 1])
def test_a_head_of_another_length(tmp_path: Path, length: int) -> None:
    path = small(tmp_path / "a.safetensors")
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    assert str(path) in refused(path).saw


# ---- several files -----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return llamas.in_files(tmp_path / "a")


def with_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    path = folder / llamas.INDEX
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    return folder


def first_in(where: Any) -> Callable[[dict[str, Any]], None]:
    def change(index: dict[str, Any]) -> None:
        index["weight_map"]["model.norm.weight"] = where

    return change


INDEXES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no map": (lambda i: i.pop("weight_map"), "no weight_map"),
    "metadata with what is no number": (
        lambda i: i["metadata"].update(x=float("nan")),
        "metadata cannot be written as JSON: Out of range",
    ),
    "a map to what is no number": (first_in(float("nan")), "no name of a file"),
    "an empty map": (lambda i: i["weight_map"].clear(), "no weight_map"),
    "a map that is none": (lambda i: i.update(weight_map=[1]), "no weight_map"),
    "metadata that is none": (lambda i: i.update(metadata=[1]), "metadata is a list"),
    "a missing file": (first_in("model-4.safetensors"), "model-4.safetensors does not exist"),
    "a path out of it": (first_in("../a.safetensors"), "no name of a file"),
    "a path into it": (first_in("sub/a.safetensors"), "no name of a file"),
    "an absolute path": (first_in("/etc/passwd"), "no name of a file"),
    "its parent": (first_in(".."), "no name of a file"),
    "itself": (first_in("."), "no name of a file"),
    "no name": (first_in(""), "no name of a file"),
    "a number": (first_in(3), "no name of a file"),
    "a zero in the name": (first_in("a\0b.safetensors"), "no name of a file"),
    "a name beyond all names": (first_in("a" * 5000), "no name of a file"),
    "half a letter in a file's name": (first_in("\ud800.safetensors"), "no name of a file"),
    "half a letter": (lambda i: i["weight_map"].update({"\ud800": "x"}), r"tensor '\ud800'"),
    "another of its files": (first_in("model-00001-of-00003.safetensors"), "it is in model-00003"),
    "a file that is no weights": (first_in("config.json"), "ends in .json"),
    "a tensor that is not there": (
        lambda i: i["weight_map"].update(x="model-00001-of-00003.safetensors"),
        "x in model-00001-of-00003.safetensors, but no file has it",
    ),
    "a tensor too few": (lambda i: i["weight_map"].pop("model.norm.weight"), "lacks model.norm"),
}


@pytest.mark.parametrize("name", INDEXES)
def test_indexes(folder: Path, name: str) -> None:
    change, why = INDEXES[name]
    assert why in refused(with_index(folder, change)).saw


def test_an_index_that_is_no_json(folder: Path) -> None:
    path = folder / llamas.INDEX
    path.write_text(path.read_text()[:-9])
    assert "no JSON" in refused(folder).saw
    path.write_text('{"weight_map": {"a": "x", "a": "y"}}')
    assert "'a' occurs twice" in refused(folder).saw


def test_an_index_that_is_deeper_than_a_reader_or_a_writer_goes(folder: Path) -> None:
    path, whole = folder / llamas.INDEX, (folder / llamas.INDEX).read_text()
    for depth in range(1000, 500, -1):
        nested = "[" * depth + "]" * depth
        path.write_text(whole.replace('"total_size": ', f'"x": {nested}, "total_size": '))
        try:
            read_index(path)
        except CheckpointError:
            continue
        return
    pytest.fail("all were refused")


def test_an_index_that_says_nothing_more(folder: Path, tmp_path: Path) -> None:
    llamas.to_meta(with_index(folder, lambda i: i.update(metadata=None)), tmp_path / "b")
    written = json.loads((tmp_path / "b" / llamas.INDEX).read_text())
    assert list(written["metadata"]) == ["total_size"]


def test_links_out_of_the_folder(folder: Path, tmp_path: Path) -> None:
    shard = folder / "model-00002-of-00003.safetensors"
    shard.rename(tmp_path / "elsewhere.safetensors")
    shard.symlink_to(tmp_path / "elsewhere.safetensors")
    assert f"a link to {tmp_path / 'elsewhere.safetensors'}" in refused(folder).saw
    (folder / llamas.INDEX).unlink()
    assert "outside of it" in refused(folder).saw


@pytest.mark.parametrize("below", ["", "text_encoder", "a/b"])
def test_the_links_of_a_hubs_cache(folder: Path, tmp_path: Path, below: str) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc" / below
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(number))
        snapshot.joinpath(file.name).symlink_to(blobs / f"{number}")
    assert open_source(snapshot).keys() == llamas.weights().keys()


@pytest.mark.parametrize("kind", ["folder", "pipe", "nothing"])
def test_what_is_no_file(folder: Path, kind: str) -> None:
    shard = folder / "model-00002-of-00003.safetensors"
    shard.unlink()
    if kind == "folder":
        shard.mkdir()
    if kind == "pipe":
        os.mkfifo(shard)
    expected = "does not exist" if kind == "nothing" else "is no file"
    assert expected in refused(folder).saw


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    folder = llamas.in_files(tmp_path / "b", pattern="part_{}_of_{}")
    (folder / llamas.INDEX).unlink()
    for number in (1, 2, 3):
        (folder / f"part_{number}_of_3.safetensors").rename(folder / f"part_{number}.safetensors")
    assert len(open_source(folder)) == 21
    save_file({"lm_head.weight": torch.zeros(3)}, folder / "part_4.safetensors")
    error = refused(folder)
    assert "lm_head.weight is in " in error.saw
    assert "merge" in error.do


def test_two_checkpoints_in_one_folder(folder: Path) -> None:
    llamas.one_file(folder / "model.safetensors")
    error = refused(folder)
    assert error.needed.startswith("one checkpoint")
    assert error.do == f"name one of them: {folder / llamas.INDEX}"
    assert len(open_source(folder / "model.safetensors")) == 21
    assert len(open_source(folder / llamas.INDEX)) == 21


PARTS = "it lacks model-00002-of-00003.safetensors"


@pytest.mark.parametrize(
    ("there", "saw"),
    [
        (["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"], PARTS),
        (["model-00001-of-00003.safetensors"], f"{PARTS}, model-00003-of-00003.safetensors"),
        (["model-00000-of-00003.safetensors", "model-00001-of-00003.safetensors"], PARTS),
        (["model-1-of-9.safetensors"], "4-of-9.safetensors and more"),
        ([f"model-1-of-{'9' * 60}.safetensors"], "model-4-of-999"),
        (["pytorch_model-00001-of-00002.bin"], "lacks pytorch_model-00002-of-00002.bin"),
        (["model.safetensors", "model.fp16.safetensors"], "model.fp16.safetensors, model.saf"),
        (["model.safetensors", "model-00001-of-00001.safetensors"], "model.safetensors"),
        (["model-1-of-2.safetensors", "model-2-of-3.safetensors"], "model-2-of-3.safetensors"),
        (["unet.safetensors", "vae.safetensors"], "unet.safetensors, vae.safetensors"),
        (["unet-1.safetensors", "vae-2.safetensors"], "unet-1.safetensors, vae-2.safetensors"),
        ([f"{name}.bin" for name in "abcdef"], "holds a.bin, b.bin, c.bin, d.bin and 2 more"),
    ],
)
def test_files_that_are_no_one_checkpoint(tmp_path: Path, there: list[str], saw: str) -> None:
    for number, name in enumerate(there):
        save = save_file if name.endswith(".safetensors") else torch.save
        save({f"{number}": torch.zeros(2)}, tmp_path / name)
    error = refused(tmp_path)
    assert saw in error.saw
    assert "index" not in error.needed or error.needed.startswith("one checkpoint: ")


@pytest.mark.parametrize("first", [0, 1])
def test_parts_without_an_index(tmp_path: Path, first: int) -> None:
    for number in range(first, first + 3):
        path = tmp_path / f"model-{number:05}-of-00003.safetensors"
        save_file({f"{number}": torch.zeros(2)}, path)
    assert len(open_source(tmp_path)) == 3


@pytest.mark.parametrize("beside", ["consolidated", "adapter_model"])
def test_what_lies_beside_a_model_is_left(tmp_path: Path, beside: str) -> None:
    """The same model once more in the names of its publisher, or what was trained on top of it."""
    folder, state = tmp_path / "a", llamas.weights()
    folder.mkdir()
    llamas.one_file(folder / "model.safetensors", state)
    llamas.one_file(folder / f"{beside}.safetensors", llamas.in_metas(state))
    assert open_source(folder).keys() == state.keys()
    done = llamas.to_meta(folder, tmp_path / "b")
    assert os.listdir(tmp_path / "b") == ["model.safetensors"]
    assert done.not_copied == (f"{beside}.safetensors",)
    (folder / "model.safetensors").unlink()
    assert open_source(folder).keys() == llamas.in_metas(state).keys()


def test_no_checkpoint(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "missing").saw
    tmp_path.joinpath("readme.txt").write_text("words")
    assert "holds no weights: readme.txt" in refused(tmp_path).saw
    assert "ends in .txt" in refused(tmp_path / "readme.txt").saw
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert "neither a file nor a folder" in refused(tmp_path / "pipe.safetensors").saw
    assert "is no file" in refused(tmp_path).saw


def test_a_file_that_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", forbidden)
    assert "cannot be read: Permission denied" in refused(folder).saw


# ---- files of torch ----------------------------------------------------------------------------


class Harmful:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("harm",)


@pytest.mark.parametrize("zipped", [True, False])
def test_no_pickle_is_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zipped: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.bin"
    torch.save({"a": Harmful()}, path, _use_new_zipfile_serialization=zipped)
    said = f"{path} holds code ({os.mkdir.__module__}.mkdir) and was not read"
    assert refused(path).saw.startswith(said)
    path.write_bytes(pickle.dumps(Harmful()))
    error = refused(path)  # torch's text, which is left out, recommends to switch weights_only off
    assert error.saw.startswith(f"{path} holds code and was not read")
    assert (error.__cause__, error.__suppress_context__) == (None, True)
    assert "weights_only" not in str(error)
    assert os.listdir(tmp_path) == ["a.bin"]


def test_a_program_is_said_to_be_one(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match="jit"):
        torch.jit.script(torch.nn.Linear(3, 2)).save(tmp_path / "a.pt")
    assert "holds code and was not read" in refused(tmp_path / "a.pt").saw


@pytest.mark.parametrize(
    ("content", "saw"),
    [
        ({"model": {"a": torch.zeros(2)}}, "'model', a dict"),
        ({"a": torch.zeros(2), "epoch": 3}, "'epoch', a int"),
        ({3: torch.zeros(2)}, "3, a "),
        ({"a": torch.zeros(2).to_sparse()}, "in torch.sparse_coo"),
        ({"a": torch.zeros(2, dtype=torch.complex128)}, "'a', a torch.complex128 tensor"),
        ({"__metadata__": torch.zeros(2)}, "'__metadata__', a"),
        ({"\ud800": torch.zeros(2)}, "'\\ud800', a"),
        ([torch.zeros(2)], "holds a list"),
        ({}, "holds an empty dict"),
    ],
)
def test_what_is_no_state_dict(tmp_path: Path, content: Any, saw: str) -> None:
    torch.save(content, tmp_path / "a.pt")
    assert saw in refused(tmp_path / "a.pt").saw


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("kept", [0, 1, 10, 100, -1, -10, -100])
def test_files_of_torch_that_are_cut_off(tmp_path: Path, zipped: bool, kept: int) -> None:
    path = tmp_path / "a.pth"
    state = llamas.weights()
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    path.write_bytes(path.read_bytes()[:kept])
    assert refused(path).saw.startswith(f"{path} cannot be read: it is damaged")
