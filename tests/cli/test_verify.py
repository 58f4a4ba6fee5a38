"""``headwise verify``: the same function or not, in words and in the exit status."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headwise.cli.verify import verify
from headwise.errors import OptionError
from headwise.layouts.convert import convert
from tests.cli.alone import Alone
from tests.layouts.checkpoint import llamas

run = Alone(verify).invoke


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One file, of numbers such as weights have."""
    folder = llamas.in_files(tmp_path / "a")
    generator = torch.Generator().manual_seed(0)
    state = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, x in load_file(file).items():
            state[name] = torch.randn(x.shape, generator=generator).to(x.dtype) / 4
        file.unlink()
    (folder / llamas.INDEX).unlink(missing_ok=True)
    save_file(state, folder / "model.safetensors")
    return folder


@pytest.fixture
def meta(folder: Path, tmp_path: Path) -> Path:
    state = load_file(folder / "model.safetensors")
    path = tmp_path / "meta.safetensors"
    counts = {"heads": llamas.HEADS, "kv_heads": llamas.KV_HEADS}
    save_file(convert(state, "llama", "llama-meta", **counts), path)
    return path


def test_the_same(folder: Path, meta: Path) -> None:
    done = run(folder, meta)
    assert done.exit_code == 0, done.exception
    assert done.stdout.splitlines() == [
        "llama against llama-meta",
        "21 tensors are the same: the same function, byte for byte",
    ]


def test_the_outputs_too(folder: Path, meta: Path) -> None:
    done = run(folder, meta, "--outputs")
    assert done.exit_code == 0, done.exception
    assert done.stdout.count("the same outputs") == 2


def test_another_number_is_named(folder: Path, meta: Path) -> None:
    state = load_file(meta)
    name = "layers.1.attention.wv.weight"
    state[name][3, 5] += 1
    save_file(state, meta)
    done = run(folder, meta, "--outputs")
    assert done.exit_code == 1
    assert f"{name}, of model.layers.1.self_attn.v_proj.weight: 1 of" in done.stdout
    assert done.stdout.count("OTHER OUTPUTS") == 1


def test_outputs_of_no_numbers_are_refused(tmp_path: Path) -> None:
    folder = llamas.in_files(tmp_path / "a")
    done = run(folder, folder, "--outputs")
    assert isinstance(done.exception, OptionError)
    assert "that are NaN or infinite" in done.exception.saw


def test_digests_find_one_bit(meta: Path, tmp_path: Path) -> None:
    digests = tmp_path / "digests.json"
    assert run(meta, "--write-digests", digests).exit_code == 0
    assert run(meta, digests).exit_code == 0
    content = bytearray(meta.read_bytes())
    content[-1] ^= 1
    meta.write_bytes(content)
    done = run(meta, digests)
    assert done.exit_code == 1
    assert "changed" in done.stdout
    assert done.stdout.splitlines()[-1] == "20 of 21 tensors are what they were"


def test_nothing_to_compare_with(meta: Path) -> None:
    done = run(meta)
    assert done.exit_code == 2
    assert "what to compare with" in done.stderr
