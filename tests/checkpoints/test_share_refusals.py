"""Shares that do not make up a model are refused, and a division that does not come back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from headwise.checkpoints.description import open_checkpoint
from headwise.checkpoints.shares import JoinedSource
from headwise.cli.convert import convert
from headwise.errors import CheckpointError, HeadwiseError, OptionError, UndecidedError
from headwise.layouts import shards
from headwise.layouts.plan import RoundTripError
from tests.checkpoints import llamas
from tests.checkpoints.shares import (
    COUNTS,
    HEADS,
    SIZES,
    megatrons_shares,
    metas_params,
    metas_shares,
    write_megatron,
    write_shares,
)
from tests.checkpoints.test_write_meta_llama_files import model
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


# ---- what is refused -----------------------------------------------------------------------------


def damaged(change: Callable[[list[dict[str, Tensor]]], object]) -> Callable[..., HeadwiseError]:
    def refused(llama: Path, tmp_path: Path) -> HeadwiseError:
        shares = metas_shares(llama, 2)
        change(shares)
        folder = metas_params(write_shares(tmp_path / "meta", shares))
        return COMMAND.refused(folder, tmp_path / "joined", "--to", "llama")

    return refused


def narrower(shares: list[dict[str, Tensor]]) -> None:
    shares[1]["layers.0.attention.wo.weight"] = torch.zeros(60, 20)


def another_dtype(shares: list[dict[str, Tensor]]) -> None:
    shares[1] = {name: x.bfloat16() for name, x in shares[1].items()}


def another_norm(shares: list[dict[str, Tensor]]) -> None:
    shares[1]["norm.weight"][3] += 1


DAMAGED = {
    "narrower": (narrower, ("wo.weight is torch.float32 (60, 30) in meta/consolidated.00.pth",)),
    "another dtype": (another_dtype, ("torch.bfloat16",)),
    "another norm": (another_norm, ("norm.weight differs between", "consolidated.01.pth")),
    "a tensor less": (
        lambda shares: shares[1].pop("norm.weight"),
        ("norm.weight is in meta/consolidated.00.pth alone",),
    ),
}


@pytest.mark.parametrize("row", DAMAGED.values(), ids=DAMAGED)
def test_shares_of_other_models_are_refused(row: Any, llama: Path, tmp_path: Path) -> None:
    error = damaged(row[0])(llama, tmp_path)
    assert isinstance(error, CheckpointError)
    assert [word for word in row[1] if word not in error.saw] == [], error.saw
    assert not (tmp_path / "joined").exists()


@pytest.mark.parametrize(
    ("missing", "saw"),
    [
        ([0], "it lacks consolidated.00.pth"),
        ([2], "it lacks consolidated.02.pth"),
        ([5], "it holds 5 of 6 shares, and lacks consolidated.05.pth"),
        (
            [2, 3, 4, 5],
            "it holds 2 of 6 shares, and lacks consolidated.02.pth, consolidated.03.pth",
        ),
        ([1, 2, 3, 4, 5], "it holds 1 of 6 shares, and lacks consolidated.01.pth"),
    ],
)
def test_a_missing_share_is_named(
    llama: Path, tmp_path: Path, missing: list[int], saw: str
) -> None:
    folder = metas_params(write_shares(tmp_path / "meta", metas_shares(llama, 6)))
    for rank in missing:
        (folder / f"consolidated.{rank:02}.pth").unlink()
    error = COMMAND.refused(folder, tmp_path / "joined", "--to", "llama")
    assert isinstance(error, CheckpointError)
    assert saw in error.saw


def test_neighbours_with_other_copies_of_a_kv_head_are_refused(llama: Path, tmp_path: Path) -> None:
    shares = metas_shares(llama, 6)
    shares[4]["layers.1.attention.wk.weight"][3, 5] += 1
    folder = metas_params(write_shares(tmp_path / "meta", shares))
    error = COMMAND.refused(folder, tmp_path / "joined", "--to", "llama")
    assert "layers.1.attention.wk.weight differs between" in error.saw
    assert error.needed == "the same kv head in neighbouring shares"


def test_more_shares_than_the_heads_are_refused(llama: Path, tmp_path: Path) -> None:
    shares = metas_shares(llama, 2)
    folder = metas_params(write_shares(tmp_path / "meta", [*shares, *shares]))
    error = COMMAND.refused(folder, tmp_path / "joined", "--to", "llama")
    assert "4 shares of layers.0.attention.wq.weight with 30 rows or columns each" in error.saw


def test_files_of_megatron_that_are_no_shares(llama: Path, tmp_path: Path) -> None:
    shares = megatrons_shares(llama, 2)
    pipeline = tmp_path / "pipeline"
    write_megatron(pipeline, shares)
    (pipeline / "mp_rank_01").rename(pipeline / "mp_rank_00_001")
    command = (tmp_path / "x", "--from", "megatron", "--to", "llama", *COUNTS)
    assert "mp_rank_00_001" in COMMAND.refused(pipeline, *command).saw
    missing = write_megatron(tmp_path / "missing", shares)
    (missing / "mp_rank_00").rename(missing / "mp_rank_02")
    assert "it lacks mp_rank_00" in COMMAND.refused(missing, *command).saw
    empty = write_megatron(tmp_path / "empty", shares)
    (empty / "mp_rank_01" / "model_optim_rng.pt").unlink()
    assert "mp_rank_01 holds no weights" in COMMAND.refused(empty, *command).saw


def test_shares_without_a_layout_that_fits(llama: Path, tmp_path: Path) -> None:
    state = [{"x.weight": torch.ones(2, 3)}] * 2
    folder = write_shares(tmp_path / "meta", state)
    with pytest.raises(CheckpointError, match="holds 2 shares of each tensor, in no layout"):
        open_checkpoint(folder, {})
    with pytest.raises(OptionError, match="as shares of llama"):
        open_checkpoint(folder, {}, stored="llama")


def test_layouts_that_divide_tensors_differently_are_not_guessed(tmp_path: Path) -> None:
    """Rows of a fused tensor, where heads and widths fit two orders of rows."""
    name = "transformer.layers.0.attention."
    share = {f"{name}query_key_value.weight": torch.ones(90, 60)} | {
        f"{name}dense.weight": torch.ones(60, 30)
    }
    folder = write_shares(tmp_path / "old", [share] * 2)
    with pytest.raises(UndecidedError, match="megatron-v0, megatron-v1") as error:
        open_checkpoint(folder, {"heads": 6})
    assert 'from=["megatron-v0"]' in error.value.do
    opened = open_checkpoint(folder, {"heads": 6}, stored="megatron-v0").source
    assert isinstance(opened, JoinedSource)


def test_options_that_cannot_be_used(llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "x"

    def saw(*options: object) -> str:
        return COMMAND.refused(llama, target, *options).saw

    assert saw("--to", "llama", "--shards", 2) == "--shards of 2, of safetensors files"
    meta = ("--to", "llama-meta", "--as", "meta", "--shards")
    assert "4 shares of layers.0.attention.wq.weight, which has heads 6" in saw(*meta, 4)
    assert "3 shares of layers.0.attention.wk.weight, which has kv_heads 2" in saw(*meta, 3)
    assert "weights in the layout llama, for mp_rank_00" in saw("--to", "llama", "--as", "megatron")
    megatron = ("--to", "megatron", "--as", "megatron", "--shards")
    assert "6 shares of" in saw(*megatron, 6), "Megatron cuts groups of rows, and copies none"
    assert not target.exists()


def test_parts_of_a_model_are_no_shares(tmp_path: Path) -> None:
    """Files that are numbered in the same way, with different tensors."""
    state = llamas.weights()
    names = sorted(state)
    for number in range(2):
        part = {name: state[name] for name in names[number::2]}
        save_file(part, tmp_path / f"part-{number}.safetensors")
    opened = open_checkpoint(tmp_path, HEADS)
    assert not isinstance(opened.source, JoinedSource)
    assert len(opened.source) == len(state)


# ---- faults --------------------------------------------------------------------------------------


def test_a_division_that_does_not_come_back_is_noticed(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = shards.ShardedAxis.split
    monkeypatch.setattr(
        shards.ShardedAxis, "split", lambda axis, x, count: split(axis, x, count)[::-1]
    )
    command = ("--to", "llama-meta", "--as", "meta", "--shards", 2)
    error = COMMAND.refused(llama, tmp_path / "meta", *command)
    assert isinstance(error, RoundTripError)
    assert not (tmp_path / "meta").exists()


def test_only_the_shares_of_one_tensor_are_in_memory(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = metas_params(write_shares(tmp_path / "meta", metas_shares(llama, 6)))
    joined: list[int] = []
    join = shards.ShardMap.join

    def counted(division: Any, name: str, shares: Any) -> Tensor:
        joined.append(sum(x.nbytes for x in shares))
        return join(division, name, shares)

    monkeypatch.setattr(shards.ShardMap, "join", counted)
    run(folder, tmp_path / "joined", "--to", "llama")
    largest = max(x.nbytes for x in llamas.read(llama).values())
    assert max(joined) <= 1.01 * largest
    assert len(joined) == 21
