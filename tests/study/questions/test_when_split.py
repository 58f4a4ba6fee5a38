"""When are the heads split? The verdict turns where the layer cuts elsewhere."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.layers import attention, checks
from headwise.layers.attention import Attention
from headwise.layers.latent import Product
from headwise.matrix.operator import AttentionMatrix
from headwise.study import implementations
from headwise.study.implementations import TorchLayer
from headwise.study.questions import when_split
from headwise.study.trace import (
    ATTENDED,
    INPUT,
    OUTPUT,
    PROJECTED,
    head_splits,
    rearrange_to_common_axes,
    stage_tensors,
    trace_operations,
)
from tests.study.asking import ask, failing


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(when_split, "SIZES", {"batch": 1, "length": 6, "embed_dim": 32, "heads": 2})


def operands_split_first(self: Attention, frame: Any, call: Any) -> Product:
    """x is cut into heads, and each part is projected by a block of the weights."""
    cut = frame.x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
    q, k, v = (
        cut @ when_split.diagonal_blocks(projection.weight, self.num_heads).mT
        for projection in (self.q_proj, self.k_proj, self.v_proj)
    )
    return Product(AttentionMatrix(q, k), v, lambda outputs: outputs)


def test_a_layer_that_splits_first_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_product_of_call", operands_split_first)
    said = failing(ask("when-split"))
    assert any("splits into heads" in words and "3 come after" in words for words in said)
    assert any("depend on 16 of 32 inputs" in words for words in said)
    assert any("the paper's formula" in words for words in said)


def test_a_cut_that_copies_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(x: Tensor, *, heads: int) -> Tensor:
        index = torch.arange(x.shape[-1]).unflatten(0, (heads, -1))
        return torch.stack([x.index_select(-1, own) for own in index], dim=1)

    assert head_splits(trace_of(Attention(32, 2)), head_dim=16)[0].is_view
    monkeypatch.setattr(checks, "split_heads", copied)
    assert not head_splits(trace_of(Attention(32, 2)), head_dim=16)[0].is_view
    (said,) = failing(ask("when-split"))
    assert "splits into heads" in said


def test_other_axes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Turned(nn.MultiheadAttention):
        def forward(self, *inputs: Any, **options: Any) -> Any:
            output, weights = super().forward(*inputs, **options)
            return output.flatten(0, 1)[None], weights

    monkeypatch.setattr(TorchLayer, "layer", Turned)
    assert any("for 3 sequences of 5 tokens" in words for words in failing(ask("when-split")))


class Written(nn.MultiheadAttention):
    """torch's way from shape to shape, with names for the axes that lie in one.

    Attributes:
        rows: the order of heads and batch in the rows of what is per head.
        tokens: the order of batch and length in the rows of what is concatenated.
    """

    rows = "batch heads"
    tokens = "length batch"

    def forward(self, x: Tensor, *_: Tensor, **__: Any) -> Any:
        q, k, v = nn.functional.linear(x.transpose(0, 1), self.in_proj_weight).chunk(3, -1)
        q, k, v = map(self.cut, (q, k, v))
        weights = torch.bmm(q * math.sqrt(1 / self.head_dim), k.mT).softmax(-1)
        outputs = torch.bmm(weights, v).unflatten(0, self.leading(x))
        length, batch = x.shape[1], x.shape[0]
        by_batch = outputs if self.rows == "batch heads" else outputs.transpose(0, 1)
        by_token = by_batch.permute((2, 0, 1, 3) if self.tokens == "length batch" else (0, 2, 1, 3))
        output = nn.functional.linear(by_token.reshape(batch * length, -1), self.out_proj.weight)
        if self.tokens == "batch length":
            output = output[torch.arange(length * batch).view(batch, length).T.flatten()]
        return output.view(length, batch, -1).transpose(0, 1), None

    def cut(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (self.num_heads, -1))
        order = (1, 2, 0, 3) if self.rows == "batch heads" else (2, 1, 0, 3)
        return heads.permute(order).flatten(0, 1)

    def leading(self, x: Tensor) -> tuple[int, int]:
        batch = x.shape[0]
        return (batch, self.num_heads) if self.rows == "batch heads" else (self.num_heads, batch)


def test_torchs_layer_written_out_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchLayer, "layer", Written)
    assert ask("when-split").holds


@pytest.mark.parametrize(("axis", "order"), [("rows", "heads batch"), ("tokens", "batch length")])
def test_another_order_inside_an_axis_is_noticed(
    axis: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every shape is the same, and so is the output."""
    monkeypatch.setattr(Written, axis, order)
    monkeypatch.setattr(TorchLayer, "layer", Written)
    (said,) = failing(ask("when-split"))
    assert "the order inside each axis" in said


def test_heads_of_interleaved_channels_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Head h has the channels h, h + heads, ... of q, k and v: another order, another function."""

    def interleaved(x: Tensor, *, heads: int) -> Tensor:
        index = torch.arange(x.shape[-1]).unflatten(0, (-1, heads)).mT
        return torch.stack([x.index_select(-1, own) for own in index], dim=1)

    monkeypatch.setattr(checks, "split_heads", interleaved)
    said = " ".join(failing(ask("when-split")))
    assert "the order inside each axis" in said
    assert "the paper's formula" in said
    assert "equals attention with block-diagonal projections" in said


def test_head_outputs_that_are_a_little_larger_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    product = AttentionMatrix.__matmul__
    monkeypatch.setattr(AttentionMatrix, "__matmul__", lambda a, v: product(a, v) * (1 + 2e-4))
    merged, formula, blocks = failing(ask("when-split"))
    assert "the order inside each axis" in merged
    assert "the paper's formula" in formula
    assert "equals attention with block-diagonal projections" in blocks


def test_a_layer_that_writes_its_weights_down_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttentionMatrix, "__matmul__", lambda a, v: a.dense() @ v)
    answer = ask("when-split")
    assert answer.numbers["fused"] == []
    assert "returns no attention weights" in failing(answer)[0]


def test_parameters_off_the_diagonal_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    block_diag = torch.block_diag
    monkeypatch.setattr(torch, "block_diag", lambda *blocks: block_diag(*blocks).clamp(min=1e-9))
    said = failing(ask("when-split"))
    assert any("leaves 3,072 of the 3,072 parameters" in words for words in said)


def test_weights_that_are_zero_off_the_diagonal_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then both orders are the same function."""

    class Blocks(Attention):
        def reset_parameters(self) -> None:
            super().reset_parameters()
            kept = torch.block_diag(*torch.ones(2, 16, 16)) if self.embed_dim == 32 else 1.0
            for projection in (self.q_proj, self.k_proj, self.v_proj):
                projection.weight.data.mul_(kept)

    monkeypatch.setattr(implementations, "Attention", Blocks)
    said = failing(ask("when-split"))
    assert any("depend on 16 of 32 inputs" in words for words in said)
    assert any("does not equal attention" in words for words in said)


def test_blocks_on_the_diagonal() -> None:
    weight = torch.arange(16.0).reshape(4, 4)
    expected = torch.tensor([[[0.0, 1.0], [4.0, 5.0]], [[10.0, 11.0], [14.0, 15.0]]])
    assert when_split.diagonal_blocks(weight, 2).equal(expected)


def test_shares_of_blocks() -> None:
    reach = torch.block_diag(torch.ones(2, 2), torch.eye(2)).bool()
    assert when_split.nonzero_share_by_block(reach, 2) == [[1, 0], [0, 0.5]]


def trace_of(layer: Attention) -> tuple[Any, ...]:
    return trace_operations(layer, torch.randn(1, 6, 32), layer)


def test_stages_of_a_trace() -> None:
    steps = trace_of(Attention(32, 2))
    stages = [step.stage for step in steps]
    assert stages[0] == INPUT
    assert stages[-1] == OUTPUT
    assert {PROJECTED, ATTENDED} < set(stages)
    assert len([step for step in steps if step.is_product and step.stage == PROJECTED]) == 3
    assert [cut.stage for cut in head_splits(steps, head_dim=16)] == [PROJECTED] * 3
    assert all(cut.is_view for cut in head_splits(steps, head_dim=16))
    tensors = stage_tensors(steps, head_dim=16)
    assert tensors["per_head"].shape == (1, 2, 6, 16)
    assert "weights" not in tensors


def test_an_axis_that_holds_two() -> None:
    sizes = {"batch": 2, "length": 3, "heads": 4, "head_dim": 5}
    x = torch.arange(120.0).view(8, 3, 5)
    apart = rearrange_to_common_axes(x, ("batch*heads", "length", "head_dim"), sizes)
    assert apart.shape == (2, 3, 4, 5)
    assert apart[1, 2, 3].equal(x[1 * 4 + 3, 2])
    merged = rearrange_to_common_axes(x.view(6, 20), ("length*batch", "embed_dim"), sizes)
    assert merged[1, 2, 3].equal(x.view(6, 20)[2 * 2 + 1, 15:])


def test_all_results_of_a_step_are_kept() -> None:
    """The memory of one that is let go could become that of another tensor."""
    layer = nn.Linear(4, 4)
    steps = trace_operations(layer, torch.randn(3, 4), lambda x: layer(x.sort(dim=0)[0]))
    (sort,) = (step for step in steps if step.operation == "sort")
    assert [result.dtype for result in sort.results] == [torch.float32, torch.int64]
    assert sort.result is sort.results[0]


def test_a_copy_is_no_view() -> None:
    layer = nn.Linear(4, 4)
    steps = trace_operations(layer, torch.ones(1, 4), lambda x: layer(x).clone())
    assert not steps[-1].is_view
