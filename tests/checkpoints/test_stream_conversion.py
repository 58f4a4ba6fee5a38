"""A checkpoint in another layout: the right numbers, in the right files, and the way back."""

import json
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from headwise.checkpoints import staging
from headwise.checkpoints.conversion import convert_checkpoint
from headwise.checkpoints.source import open_source
from headwise.errors import DTypeError, OptionError
from tests.checkpoints import llamas


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_one_file_there_and_back(tmp_path: Path, dtype: torch.dtype) -> None:
    state = llamas.weights(dtype)
    source = llamas.one_file(tmp_path / "a.safetensors", state)
    done = llamas.to_meta(source, tmp_path / "b.safetensors")
    llamas.assert_same(llamas.read(done.target), llamas.in_metas(state))
    assert (done.tensors, done.rewritten, done.not_copied) == (21, 4, ())
    assert done.nbytes == done.target.stat().st_size
    llamas.back(done.target, tmp_path / "c.safetensors")
    llamas.assert_same(llamas.read(tmp_path / "c.safetensors"), state)
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b.safetensors", "c.safetensors"]


def test_several_files_there_and_back_are_the_same_tensors(tmp_path: Path) -> None:
    source = llamas.in_files(tmp_path / "a")
    done = llamas.to_meta(source, tmp_path / "b")
    llamas.assert_same(llamas.read(tmp_path / "b"), llamas.in_metas(llamas.weights()))
    files = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert sorted(os.listdir(tmp_path / "b")) == [*files, llamas.INDEX]
    assert done.not_copied == ("config.json",)
    llamas.back(tmp_path / "b", tmp_path / "c")
    for file in files:
        llamas.assert_same(llamas.read(tmp_path / "c" / file), llamas.read(source / file))
    index = (source / llamas.INDEX).read_text()
    assert (tmp_path / "c" / llamas.INDEX).read_text() == index


def test_the_index_says_where_everything_is(tmp_path: Path) -> None:
    llamas.to_meta(llamas.in_files(tmp_path / "a"), tmp_path / "b")
    index = json.loads((tmp_path / "b" / llamas.INDEX).read_text())
    for file in set(index["weight_map"].values()):
        with safe_open(tmp_path / "b" / file, framework="pt") as shard:
            here = {name for name, where in index["weight_map"].items() if where == file}
            assert set(shard.keys()) == here
    state = llamas.weights()
    assert index["metadata"] == {"total_size": sum(x.nbytes for x in state.values())}


def test_what_is_fused_over_files_goes_into_the_first(tmp_path: Path) -> None:
    """q, k and v lie in three files here, and become one tensor."""
    folder = tmp_path / "a"
    folder.mkdir()
    parts = [{"q_proj": 60, "out_proj": 0}, {"k_proj": 60}, {"v_proj": 60}]
    state = {}
    for number, part in enumerate(parts):
        shapes = {n: (rows, 40) if rows else (40, 60) for n, rows in part.items()}
        tensors = {f"attn.{n}.weight": torch.randn(shape) for n, shape in shapes.items()}
        save_file(tensors, folder / f"model-{number}.safetensors")
        state |= tensors
    convert_checkpoint(
        open_source(folder), tmp_path / "b", "headwise", "torch-packed", heads=6, kv_heads=6
    )
    packed = torch.cat([state[f"attn.{n}_proj.weight"] for n in "qkv"])
    expected = {
        "attn.in_proj_weight": packed,
        "attn.out_proj.weight": state["attn.out_proj.weight"],
    }
    llamas.assert_same(llamas.read(tmp_path / "b"), expected)
    assert [f.name for f in (tmp_path / "b").glob("*.safetensors")] == ["model-0.safetensors"]


def test_a_file_of_torch_becomes_safetensors(tmp_path: Path) -> None:
    state = llamas.weights()
    wide = torch.randn(80, 90, dtype=torch.float64)
    extra = {"rope.table": wide.T[::2], "steps": torch.tensor(7), "none": torch.empty(0, 3)}
    extra["one"] = torch.randn(3, 2)[1:2, 1]
    assert extra["one"].stride() == (2,)
    folder = tmp_path / "a"
    folder.mkdir()
    names = list(state)
    torch.save({n: state[n] for n in names[:9]}, folder / "pytorch_model-00001-of-00002.bin")
    rest = {n: state[n] for n in names[9:]} | extra
    torch.save(rest, folder / "pytorch_model-00002-of-00002.bin")
    llamas.to_meta(folder, tmp_path / "b")
    llamas.assert_same(llamas.read(tmp_path / "b"), llamas.in_metas(state) | extra)
    assert sorted(os.listdir(tmp_path / "b")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        llamas.INDEX,
    ]


def test_what_a_file_of_torch_leaves_to_be_done(tmp_path: Path) -> None:
    """Such a tensor is stored as it was before, with a mark."""
    turn, state = torch.randn(4, dtype=torch.complex64), llamas.weights()
    marked = {"turn": turn.conj(), "imaginary": turn[:1].clone().conj().imag}
    assert (marked["turn"].is_conj(), marked["imaginary"].is_neg()) == (True, True)
    learned = {"scale": torch.nn.Parameter(torch.ones(2))}
    torch.save(state | marked | learned, tmp_path / "a.bin")
    opened = open_source(tmp_path / "a.bin")
    assert not any(x.is_conj() or x.is_neg() or x.requires_grad for x in opened.values())
    llamas.to_meta(tmp_path / "a.bin", tmp_path / "b.safetensors")
    made = llamas.read(tmp_path / "b.safetensors")
    assert made["turn"].tolist() == [x.conjugate() for x in turn.tolist()]
    assert made["imaginary"].tolist() == [-turn[0].imag.item()]
    assert made["scale"].tolist() == [1, 1]


def test_torchs_format_of_before_2020(tmp_path: Path) -> None:
    state = llamas.weights()
    torch.save(state, tmp_path / "a.pth", _use_new_zipfile_serialization=False)
    llamas.to_meta(tmp_path / "a.pth", tmp_path / "b.safetensors")
    llamas.assert_same(llamas.read(tmp_path / "b.safetensors"), llamas.in_metas(state))


def test_every_dtype_that_is_only_copied(tmp_path: Path) -> None:
    state, generator = llamas.weights(), torch.Generator().manual_seed(0)
    bits = torch.randint(256, (16,), generator=generator, dtype=torch.uint8)
    dtypes = [torch.uint8, torch.int16, torch.int64, torch.float8_e4m3fn, torch.complex64]
    state |= {f"extra.{n}": bits.clone().view(dtype) for n, dtype in enumerate(dtypes)}
    state |= {"flag": torch.tensor([True, False, True]), "empty": torch.empty(3, 0)}
    done = llamas.to_meta(
        llamas.one_file(tmp_path / "a.safetensors", state), tmp_path / "b.safetensors"
    )
    more = {n: x for n, x in state.items() if n.startswith(("extra", "flag", "empty"))}
    llamas.assert_same(llamas.read(done.target), llamas.in_metas(state) | more)


def test_a_head_of_odd_length(tmp_path: Path) -> None:
    """The numbers then stand at no multiple of their width."""
    source = llamas.one_file(tmp_path / "a.safetensors")
    raw = source.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    head = raw[8 : 8 + length].rstrip(b" ")
    head += b" " * (1 - len(head) % 2)
    source.write_bytes(len(head).to_bytes(8, "little") + head + raw[8 + length :])
    llamas.to_meta(source, tmp_path / "b.safetensors")
    expected = llamas.in_metas(llamas.weights())
    llamas.assert_same(llamas.read(tmp_path / "b.safetensors"), expected)


def test_a_system_that_cannot_copy_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unable(*_: object) -> int:
        raise OSError(18, "Invalid cross-device link")

    source = llamas.in_files(tmp_path / "a")
    llamas.to_meta(source, tmp_path / "b")
    monkeypatch.setattr(os, "copy_file_range", unable)
    monkeypatch.setattr(staging, "CHUNK", 1000)
    llamas.to_meta(source, tmp_path / "c")
    assert llamas.bytes_of(tmp_path / "c") == llamas.bytes_of(tmp_path / "b")


def test_a_system_that_writes_little_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, copy = os.write, os.copy_file_range
    source = llamas.in_files(tmp_path / "a")
    llamas.to_meta(source, tmp_path / "b")
    monkeypatch.setattr(os, "write", lambda f, data: real(f, data[:700]))
    monkeypatch.setattr(os, "copy_file_range", lambda a, b, n, at: copy(a, b, min(n, 700), at))
    llamas.to_meta(source, tmp_path / "c", verify=True)
    assert llamas.bytes_of(tmp_path / "c") == llamas.bytes_of(tmp_path / "b")


def test_a_system_that_reads_nothing_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = llamas.in_files(tmp_path / "a")
    llamas.to_meta(source, tmp_path / "b")
    monkeypatch.delattr(os, "posix_fadvise")
    llamas.to_meta(source, tmp_path / "c")
    assert llamas.bytes_of(tmp_path / "c") == llamas.bytes_of(tmp_path / "b")


def test_progress_is_in_bytes_and_ends_at_all(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    source = llamas.in_files(tmp_path / "a")
    llamas.to_meta(source, tmp_path / "b", progress=lambda *now: told.append(now))
    total = sum(x.nbytes for x in llamas.weights().values())
    assert {all_ for _, _, all_ in told} == {total}
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert told[-1] == ("waiting for the disk", total, total)


def test_files_are_as_others_are(tmp_path: Path) -> None:
    """A hidden folder and its files are readable by whom the user's mask allows."""
    before = os.umask(0o027)
    try:
        llamas.to_meta(llamas.in_files(tmp_path / "a"), tmp_path / "b")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o750
    modes = {stat.S_IMODE(f.stat().st_mode) for f in (tmp_path / "b").iterdir()}
    assert modes == {0o640}


def test_dtypes_that_cannot_be_fused_are_refused_first(tmp_path: Path) -> None:
    state = {f"{n}_proj.weight": torch.randn(60, 40) for n in "qkv"}
    state["k_proj.weight"] = state["k_proj.weight"].half()
    save_file(state | {"out_proj.weight": torch.randn(40, 60)}, tmp_path / "a.safetensors")
    source = open_source(tmp_path / "a.safetensors")
    with pytest.raises(DTypeError, match=r"wk in torch.float16.*\n.*one dtype"):
        convert_checkpoint(
            source, tmp_path / "b.safetensors", "headwise", "torch-packed", heads=6, kv_heads=6
        )
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_a_bias_without_a_place_is_refused_first(tmp_path: Path) -> None:
    state = llamas.weights()
    name = "model.layers.1.self_attn.q_proj.bias"
    biases = {
        f"model.layers.{layer}.self_attn.{n}_proj.bias": torch.zeros(rows, dtype=torch.bfloat16)
        for layer in range(2)
        for n, rows in {"q": 60, "k": 20, "v": 20}.items()
    }
    source = llamas.one_file(tmp_path / "a.safetensors", state | biases)
    options = {"heads": 6, "kv_heads": 2}
    done = convert_checkpoint(
        open_source(source), tmp_path / "b.safetensors", "qwen2", "llama-meta", **options
    )
    llamas.assert_same(_attention(llamas.read(done.target)), _attention(llamas.in_metas(state)))
    biases[name][3] = -0.0
    llamas.one_file(source, state | biases)
    with pytest.raises(OptionError, match="bq, which llama-meta has no tensor for"):
        convert_checkpoint(
            open_source(source), tmp_path / "c.safetensors", "qwen2", "llama-meta", **options
        )
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b.safetensors"]


def _attention(state: llamas.State) -> llamas.State:
    return {name: x for name, x in state.items() if ".attention.w" in name}
