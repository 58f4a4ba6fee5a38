"""Packing: the verdict turns when numbers or order are lost, or when objects matter."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import activation

from headwise.layers.attention import Attention
from headwise.layers.torch_api import layer as shared_forward
from headwise.layers.torch_api.layer import MultiheadAttention
from headwise.matrix.operator import AttentionMatrix
from headwise.study.implementations import (
    GPT2,
    DropIn,
    HeadwiseAttention,
    Implementation,
    SharedWeights,
)
from headwise.study.questions import packing
from headwise.study.questions.packing import PackingForm
from tests.study.asking import ask, failed_facts

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"EMBED_DIM": 36, "HEADS": 6, "QUERIES": 9, "KEYS": 11}.items():
        monkeypatch.setattr(packing, name, value)
    monkeypatch.setattr(packing, "TOKENS", 5)
    monkeypatch.setattr(packing, "ROUNDS", 1)


def test_small_sizes_hold() -> None:
    assert failed_facts("packing") == []


@pytest.mark.parametrize("kind", [DropIn, HeadwiseAttention, GPT2])
def test_a_layer_that_stores_rounded_weights(
    kind: type[Implementation], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = kind.load_weights

    def rounded(self: Implementation, given: SharedWeights) -> Implementation:
        matrices = (matrix.bfloat16().float() for matrix in given.matrices)
        return fill(self, SharedWeights.of_matrices(matrices, given.biases or ()))

    monkeypatch.setattr(kind, "load_weights", rounded)
    found = failed_facts("packing")
    assert "with no bit changed" in found[0]
    assert "in self-attention the outputs" in found[1]


def test_a_gpt2_that_does_not_transpose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its matrix filled as torch's would be: the form matters, and so does which one it is."""

    def by_rows(self: GPT2) -> SharedWeights:
        fused, out = self.inner.c_attn, self.inner.c_proj
        packed = fused.weight.view(fused.weight.shape[::-1])
        biases = (*fused.bias.chunk(3), out.bias)
        return SharedWeights(*packed.chunk(3), out.weight.mT, biases)

    monkeypatch.setattr(GPT2, "as_shared_weights", by_rows)
    kept, output = failed_facts("packing")
    assert "GPT-2's layer" in kept
    assert "in self-attention the outputs" in output


@pytest.mark.parametrize("lost", ["last number", "order"])
def test_a_form_that_loses_something(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = PackingForm.pack

    def careless(self: PackingForm, small: Tensor) -> list[Tensor]:
        matrices = pack(self, small)
        if lost == "order":
            return [matrix.flip(0) for matrix in matrices]
        matrices[-1][-1, -1] = -0.0
        return matrices

    monkeypatch.setattr(PackingForm, "pack", careless)
    assert "with no bit changed" in failed_facts("packing")[0]


def test_a_product_that_is_not_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    product = AttentionMatrix.__matmul__
    monkeypatch.setattr(AttentionMatrix, "__matmul__", lambda a, v: product(a, v) * (1 + 2e-4))
    found = failed_facts("packing")
    assert "in self-attention the outputs" in found[0]
    assert "from another text" in found[1]


def test_keys_and_values_taken_from_the_wrong_text(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Attention.forward

    def stubborn(self: Attention, x: Tensor, source: Tensor | None = None, **call: Any) -> Tensor:
        output: Tensor = forward(self, x, None, **call)
        return output

    monkeypatch.setattr(Attention, "forward", stubborn)
    (words,) = failed_facts("packing")
    assert "from another text" in words


def test_heads_that_are_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights of zero and biases of one, no order of the packed matrix is wrong."""
    monkeypatch.setattr(activation, "xavier_uniform_", nn.init.zeros_)
    monkeypatch.setattr(nn.init, "normal_", lambda x, **sizes: nn.init.ones_(x))
    (words,) = failed_facts("packing")
    assert words.startswith("the order matters")


def test_a_layer_that_asks_which_objects_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    projected = shared_forward._project_heads

    def peeking(call: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = projected(call)
        is_packed = call.query is call.key or call.key is call.value
        return (q, k, v) if is_packed else (q, k, 1.001 * v)

    monkeypatch.setattr(shared_forward, "_project_heads", peeking)
    (words,) = failed_facts("packing")
    assert "one object or as equal copies" in words


def test_torchs_layer_in_the_place_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the comparison is for: its NaN with one object are seen."""
    monkeypatch.setattr(MultiheadAttention, "forward", nn.MultiheadAttention.forward)
    answer = ask("packing")
    assert answer.numbers["nan"] == answer.numbers["torch_nan"]["one"] > 0
    assert not answer.holds
    assert "one object or as equal copies" in answer.verdict


def test_bits_tell_zero_from_minus_zero() -> None:
    assert packing.same_bytes(torch.zeros(2), torch.zeros(2))
    assert not packing.same_bytes(torch.zeros(2), -torch.zeros(2))
