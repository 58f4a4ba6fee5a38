"""Checkpoints in shares of tensor-parallel processes: Meta's and Megatron's, joined and written."""

import os
from pathlib import Path

import pytest
import torch

from headwise import detect, verify
from headwise.checkpoints import load_attention
from headwise.checkpoints.description import open_checkpoint
from headwise.cli.convert import convert
from tests.checkpoints import llamas
from tests.checkpoints.shares import (
    COUNTS,
    HEADS,
    SIZES,
    VOCABULARY,
    megatrons_shares,
    metas_params,
    metas_shares,
    write_megatron,
    write_shares,
)
from tests.checkpoints.test_write_meta_llama_files import PLAIN, model
from tests.cli.alone import Alone

COMMAND = Alone(convert)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    model(tmp_path / "llama", **SIZES)
    return tmp_path / "llama"


def run(*arguments: object) -> str:
    return COMMAND.run(*arguments)[0]


def same_as(llama: Path, folder: Path) -> None:
    llamas.assert_same(llamas.read(folder), llamas.read(llama))


# ---- Meta's files --------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 6])
@pytest.mark.parametrize("columns", [False, True])
def test_metas_shares_are_joined(llama: Path, tmp_path: Path, count: int, columns: bool) -> None:
    folder = write_shares(tmp_path / "meta", metas_shares(llama, count, columns=columns))
    metas_params(folder)
    layout = detect(folder).layout
    assert layout is not None
    assert layout.name == "llama-meta"
    assert verify(folder, llama)
    x = torch.randn(2, 24, 60)
    before, after = (load_attention(each, layer=1) for each in (llama, folder))
    torch.testing.assert_close(before(x), after(x))
    lines = run(folder, tmp_path / "joined", "--to", "llama").splitlines()
    assert "21 tensors: 4 rewritten" in lines[0]
    same_as(llama, tmp_path / "joined")
    files = [f"model-0000{n + 1}-of-0000{count}.safetensors" for n in range(count)]
    index = "model.safetensors.index.json"
    assert sorted(os.listdir(tmp_path / "joined")) == ["config.json", *files, index]


@pytest.mark.parametrize("count", [1, 2, 6])
def test_metas_shares_are_written(llama: Path, tmp_path: Path, count: int) -> None:
    command = (llama, tmp_path / "meta", "--to", "llama-meta", "--as", "meta", "--shards", count)
    run(*command)
    names = [f"consolidated.{n:02}.pth" for n in range(count)]
    assert sorted(os.listdir(tmp_path / "meta")) == [*names, "params.json"]
    for name, share in zip(names, metas_shares(llama, count), strict=True):
        written = torch.load(tmp_path / "meta" / name, weights_only=True)
        llamas.assert_same(written, share)
        stored = {x.untyped_storage().nbytes() == x.nbytes for x in written.values()}
        assert stored == {True}, "a share stores more than itself"
    run(tmp_path / "meta", tmp_path / "back", "--to", "llama")
    same_as(llama, tmp_path / "back")


def test_the_code_of_llama_2_divides_the_columns_of_the_embedding(tmp_path: Path) -> None:
    llama = tmp_path / "llama"
    model(llama, **SIZES, rope_parameters={**PLAIN, "rope_theta": 10_000.0})
    run(llama, tmp_path / "meta", "--to", "llama-meta", "--as", "meta", "--shards", 2)
    for rank, share in enumerate(metas_shares(llama, 2, columns=True)):
        path = tmp_path / "meta" / f"consolidated.{rank:02}.pth"
        llamas.assert_same(torch.load(path, weights_only=True), share)


def test_tied_embeddings_are_written_twice(tmp_path: Path) -> None:
    model(tmp_path / "a", **SIZES, tie_word_embeddings=True)
    run(tmp_path / "a", tmp_path / "meta", "--to", "llama-meta", "--as", "meta", "--shards", 2)
    for rank in (0, 1):
        share = torch.load(tmp_path / "meta" / f"consolidated.{rank:02}.pth", weights_only=True)
        assert share["output.weight"].shape == (VOCABULARY // 2, 60)
        assert torch.equal(share["output.weight"], share["tok_embeddings.weight"])


# ---- Megatron's files ----------------------------------------------------------------------------


@pytest.mark.parametrize("within", ["", "iter_0000007", "release"])
def test_megatrons_shares_are_joined(llama: Path, tmp_path: Path, within: str) -> None:
    folder = write_megatron(tmp_path / "megatron", megatrons_shares(llama, 2), within=within)
    assert detect(folder, **HEADS).candidates[0][0].layout.name == "megatron"
    run(folder, tmp_path / "joined", "--from", "megatron", "--to", "llama", *COUNTS)
    same_as(llama, tmp_path / "joined")


@pytest.mark.parametrize("count", [1, 2])
def test_megatrons_shares_are_written(llama: Path, tmp_path: Path, count: int) -> None:
    command = (llama, tmp_path / "mt", "--to", "megatron", "--as", "megatron", "--shards", count)
    run(*command)
    assert (tmp_path / "mt" / "latest_checkpointed_iteration.txt").read_text() == "release"
    for rank, share in enumerate(megatrons_shares(llama, count)):
        path = tmp_path / "mt" / "release" / f"mp_rank_{rank:02}" / "model_optim_rng.pt"
        content = torch.load(path, weights_only=True)
        assert content["checkpoint_version"] == 3.0
        llamas.assert_same(content["model"], share)
    assert verify(tmp_path / "mt", llama), "the files state their layout and their heads"
    run(tmp_path / "mt", tmp_path / "back", "--to", "llama")
    same_as(llama, tmp_path / "back")


def test_the_parts_of_a_nested_state_are_joined_by_dots(llama: Path, tmp_path: Path) -> None:
    """Megatron-LM before its core: a dict for each part of the model."""
    shares = []
    for share in megatrons_shares(llama, 2):
        blocks = {
            name.removeprefix("decoder.")
            .replace("linear_qkv", "query_key_value")
            .replace("linear_proj", "dense"): x
            for name, x in share.items()
            if "self_attention" in name and "norm" not in name
        }
        embedding = {"word_embeddings": {"weight": share["embedding.word_embeddings.weight"]}}
        shares.append({"language_model": {"embedding": embedding, "encoder": blocks}})
    folder = write_megatron(tmp_path / "old", shares)  # type: ignore[arg-type]
    opened = open_checkpoint(folder, {}, stored="megatron-v2")
    assert {name: tuple(header.shape) for name, header in opened.source.headers.items()} == {
        "language_model.embedding.word_embeddings.weight": (36, 60),
        **{
            f"language_model.encoder.layers.{layer}.self_attention.{name}.weight": shape
            for layer in range(2)
            for name, shape in (("query_key_value", (100, 60)), ("dense", (60, 60)))
        },
    }
