"""Between torch.distributed.checkpoint and files that headwise converts, by torch's own storage."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from headwise import Attention, Rotary
from headwise.checkpoints.conversion import convert_checkpoint
from headwise.checkpoints.source import open_source
from headwise.sharding import gather_state, heads_plan
from tests.checkpoints.llamas import assert_same, read
from tests.sharding.ranks import ranks

pytestmark = pytest.mark.slow

COUNTS = {"heads": 6, "kv_heads": 2}
META = {"wq.weight", "wk.weight", "wv.weight", "wo.weight"}


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    options: dict[str, Any] = {"num_kv_heads": 2, "head_dim": 10, "rotary": Rotary()}
    options |= dict.fromkeys(("q_bias", "k_bias", "v_bias", "out_bias"), False)
    return nn.Sequential(*(Attention(40, 6, **options) for _ in range(2)))


def divided(seed: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = model(seed)
    return parallelize_module(layers, mesh, heads_plan(layers))


def save(folder: str) -> None:
    state = divided(seed=0).state_dict()
    files = {name: 1 + int(name[0]) for name in state}  # a file for each layer
    writer = HuggingFaceStorageWriter(
        folder, files, save_distributed=True, enable_consolidation=True
    )
    dcp.save(state, storage_writer=writer)


def load(folder: str) -> dict[str, torch.Tensor]:
    layers = divided(seed=1)
    state = layers.state_dict()
    dcp.load(state, storage_reader=HuggingFaceStorageReader(folder))
    layers.load_state_dict(state)
    return gather_state(layers)


def test_saved_by_two_ranks_converted_and_loaded_by_two(tmp_path: Path) -> None:
    """There to another layout, back, and into a divided model: the same bits."""
    stored, other, back = tmp_path / "stored", tmp_path / "other", tmp_path / "back"
    ranks(2).run(save, str(stored))
    state = model(seed=0).state_dict()
    assert_same(read(stored), state)
    convert_checkpoint(open_source(stored), other, "headwise", "llama-meta", **COUNTS)
    assert {name.partition(".")[2] for name in read(other)} == META
    convert_checkpoint(open_source(other), back, "llama-meta", "headwise", **COUNTS)
    for loaded in ranks(2).run(load, str(back)):
        assert_same(loaded, state)
