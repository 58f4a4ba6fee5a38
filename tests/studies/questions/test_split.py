"""When are the heads split? The verdict turns where the layer cuts elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.layer.attention import Attention
from headwise.matrix import AttentionMatrix
from headwise.studies.experiments.tracing import (
    ATTENDED,
    INPUT,
    OUTPUT,
    PROJECTED,
    cuts,
    shapes_on_the_way,
    trace,
)
from headwise.studies.question import Answer
from headwise.studies.questions import split
from headwise.studies.study import ask


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "ASKED", {"batch": 1, "length": 6, "embed_dim": 32, "heads": 2})


def failing(answer: Answer) -> list[str]:
    said = [words for held, words in answer.facts if not held]
    assert not answer.holds
    assert all(words in answer.verdict for words in said)
    return said


def operands_split_first(self: Attention, frame: Any, call: Any) -> tuple[AttentionMatrix, Tensor]:
    """x is cut into heads, and each part is projected by a block of the weights."""
    cut = frame.x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
    q, k, v = (
        cut @ split.blocks_of(projection.weight, self.num_heads).mT
        for projection in (self.q_proj, self.k_proj, self.v_proj)
    )
    return AttentionMatrix(q, k), v


def test_a_layer_that_splits_first_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attention, "_operands", operands_split_first)
    said = failing(ask(split.QUESTION))
    assert any("cuts into heads" in words and "3 come after" in words for words in said)
    assert any("depend on 16 of 32 inputs" in words for words in said)
    assert any("does not equal attention" in words for words in said)


def test_a_cut_that_copies_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Copied(Attention):
        def _heads(self, x: Tensor, heads: int, norm: nn.Module | None) -> Tensor:
            index = torch.arange(x.shape[-1]).unflatten(0, (heads, -1))
            return torch.stack([x.index_select(-1, own) for own in index], dim=1)

    assert not cuts(trace_of(Copied(32, 2)), head_dim=16)[0].is_view
    monkeypatch.setattr(split, "Attention", Copied)
    (said,) = failing(ask(split.QUESTION))
    assert "cuts into heads" in said


def test_other_axes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Turned(nn.MultiheadAttention):
        def forward(self, *inputs: Any, **options: Any) -> Any:
            output, weights = super().forward(*inputs, **options)
            return output.flatten(0, 1)[None], weights

    monkeypatch.setattr(nn, "MultiheadAttention", Turned)
    (said,) = failing(ask(split.QUESTION))
    assert "for 3 sequences of 5 tokens" in said


def test_heads_that_are_swapped_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = {**split.AXES["torch"], "merged": ("length", "batch*embed_dim", "heads")}
    monkeypatch.setitem(split.AXES, "torch", axes)
    said = failing(ask(split.QUESTION))
    assert len(said) == 2


def test_blocks_off_the_diagonal_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(layer: Attention) -> Attention:
        return layer

    monkeypatch.setattr(split, "block_diagonal", whole)
    said = failing(ask(split.QUESTION))
    assert any("equals attention with block-diagonal projections" in words for words in said)


def test_blocks_on_the_diagonal() -> None:
    weight = torch.arange(16.0).reshape(4, 4)
    expected = torch.tensor([[[0.0, 1.0], [4.0, 5.0]], [[10.0, 11.0], [14.0, 15.0]]])
    assert split.blocks_of(weight, 2).equal(expected)


def test_shares_of_blocks() -> None:
    reach = torch.block_diag(torch.ones(2, 2), torch.eye(2)).bool()
    assert split.by_blocks(reach, 2) == [[1, 0], [0, 0.5]]


def trace_of(layer: Attention) -> tuple[Any, ...]:
    return trace(layer, torch.randn(1, 6, 32), layer)


def test_stages_of_a_trace() -> None:
    steps = trace_of(Attention(32, 2))
    stages = [step.stage for step in steps]
    assert stages[0] == INPUT
    assert stages[-1] == OUTPUT
    assert {PROJECTED, ATTENDED} < set(stages)
    assert len([step for step in steps if step.is_product and step.stage == PROJECTED]) == 3
    assert [cut.stage for cut in cuts(steps, head_dim=16)] == [PROJECTED] * 3
    assert all(cut.is_view for cut in cuts(steps, head_dim=16))
    shapes = shapes_on_the_way(steps, head_dim=16)
    assert shapes["per_head"] == [1, 2, 6, 16]
    assert "weights" not in shapes


def test_a_copy_is_no_view() -> None:
    layer = nn.Linear(4, 4)
    steps = trace(layer, torch.ones(1, 4), lambda x: layer(x).clone())
    assert not steps[-1].is_view
