"""At 4,096 tokens no tensor of queries x keys is made, not even one bool for each entry."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.huggingface import NAME
from headwise.masks.clauses.segments import Segments
from headwise.matrix.kernels import tiled_op
from headwise.matrix.kernels.kernel import KernelResult, Task
from tests.huggingface.models import DECODER, MODELS, Case, built, watched
from tests.memory import LargestTensor

LENGTH = 4096
FEW: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}

REAL = {
    "right": lambda: torch.arange(LENGTH)[None] < 3000,
    "left": lambda: torch.arange(LENGTH)[None] >= 1000,
    "holes": lambda: torch.arange(LENGTH)[None] % 7 > 0,
    "batch": lambda: torch.arange(LENGTH) < torch.tensor([LENGTH, 2500])[:, None],
}


def case(name: str) -> Case:
    def config() -> Any:
        kept = MODELS[name].config()
        for option, value in FEW.items():
            if hasattr(kept, option):
                setattr(kept, option, value)
        kept.max_position_embeddings = LENGTH
        return kept

    return Case(config)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> LargestTensor:
    """Sees into the tiled kernel too, which is one operator."""

    def opened(_: tiled_op.TiledKernel, task: Task) -> KernelResult:
        operands = (
            *tiled_op.pack_arguments(task.problem),
            task.v,
            task.y,
            *task.requested_statistics,
        )
        return KernelResult(*tiled_op.sweep(*operands))

    monkeypatch.setattr(tiled_op.TiledKernel, "run", opened)
    return LargestTensor()


def run(model: Any, made: LargestTensor, real: Tensor | None, **options: Any) -> int:
    batch = 1 if real is None else len(real)
    ids = torch.arange(batch * LENGTH).view(batch, LENGTH) % 50 + 3
    with torch.no_grad(), made:
        model(ids, attention_mask=real, **options)
    return made.bytes


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "llama4", "bert"])
def test_without_padding(name: str, made: LargestTensor) -> None:
    assert run(built(case(name), NAME, torch.float32), made, None) < LENGTH**2, made.name


@pytest.mark.parametrize("side", REAL)
def test_with_padding(side: str, made: LargestTensor) -> None:
    real = REAL[side]()
    model = built(case("llama"), NAME, torch.float32)
    with watched() as seen:
        assert run(model, made, real) < LENGTH**2, made.name
    assert len(seen) == DECODER["num_hidden_layers"]


def test_packed_sequences(made: LargestTensor) -> None:
    model = built(case("llama"), NAME, torch.float32)
    positions = (torch.arange(LENGTH) % 900)[None]
    options = {"position_ids": positions, "use_cache": False}
    with watched() as seen:
        assert run(model, made, None, **options) < LENGTH**2, made.name
    assert all(matrix.mask.clauses_of_kind(Segments) for matrix in seen)


@pytest.mark.slow
def test_training() -> None:
    model = built(case("llama"), NAME, torch.float32).train()
    ids = torch.arange(LENGTH)[None] % 50 + 3
    with LargestTensor() as made:
        model(ids, attention_mask=REAL["right"]()).last_hidden_state.sum().backward()
    assert made.bytes < LENGTH**2, made.name


@pytest.mark.slow
def test_this_can_fail(made: LargestTensor, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = built(case("llama"), "sdpa", torch.float32)
    assert run(theirs, made, REAL["left"]()) >= LENGTH**2
    # And the tiled kernel is looked into: tiles so large that the matrix is one of them.
    monkeypatch.setattr("headwise.matrix.kernels.tiles.TILE_ELEMENTS", 2**26)
    monkeypatch.setattr("headwise.matrix.kernels.sdpa._needs_large_mask", lambda problem: True)
    inside = LargestTensor()
    assert run(built(case("llama"), NAME, torch.float32), inside, REAL["left"]()) >= LENGTH**2
