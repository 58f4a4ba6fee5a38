"""The picture everybody draws: the verdict turns where the parts are not what they are drawn as."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.layers.attention import Attention
from headwise.matrix.operator import AttentionMatrix
from headwise.study import encoder, implementations
from headwise.study.encoder import AttentionCall, RecordedRun
from headwise.study.implementations import HeadwiseAttention, Implementation, SharedWeights
from headwise.study.measures import layer_output
from headwise.study.questions import diagram
from tests.study.asking import ask, failing

LENGTH, HEADS, HEAD_DIM = 5, 3, 8


def call(seed: int) -> AttentionCall:
    """One layer of a model that computes the paper's formula."""
    generator = torch.Generator().manual_seed(seed)
    width = HEADS * HEAD_DIM

    def drawn(*shape: int) -> Tensor:
        made: Tensor = torch.randn(shape, generator=generator) * width**-0.5
        return made

    weights = SharedWeights.from_packed(
        drawn(3 * width, width), drawn(3 * width), drawn(width, width), drawn(width)
    )
    x = torch.randn(2, LENGTH, width, generator=generator)
    return AttentionCall(x, layer_output(x, x, x, *weights.tensors, num_heads=HEADS), weights)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = (call(0), call(1))

    def read(*_: Any, **__: Any) -> RecordedRun:
        real = torch.ones(2, LENGTH, dtype=torch.bool)
        return RecordedRun("a small model", HEADS, tuple("abcde"), real, calls)

    monkeypatch.setattr(encoder, "run_minilm", read)


def test_the_small_model_would_do() -> None:
    answer = ask("diagram")
    assert answer.holds, answer.verdict
    assert answer.numbers["length"] == LENGTH
    assert answer.numbers["layers"] == 2
    assert answer.numbers["strips"]["x"] == diagram.per_cent_of_quantile(
        call(0).x
    )  # the first layer's


def test_another_scale_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loud(Attention):
        def __init__(self, *sizes: int, **options: Any) -> None:
            super().__init__(*sizes, scale=1.0, **options)

    monkeypatch.setattr(implementations, "Attention", Loud)
    assert "own output" in failing(ask("diagram"))[0]


def test_head_outputs_that_are_a_little_larger_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    product = AttentionMatrix.__matmul__
    monkeypatch.setattr(AttentionMatrix, "__matmul__", lambda a, v: product(a, v) * (1 + 2e-4))
    said = failing(ask("diagram"))
    assert "own output" in said[0]
    assert "add up to the output" in said[1]


def test_a_layer_that_reads_a_part_of_x_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_part(self: Attention, x: Tensor, **options: Any) -> Tensor:
        return forward(self, x * (torch.arange(x.shape[-1]) < HEAD_DIM), **options)

    forward = Attention.forward
    monkeypatch.setattr(Attention, "forward", in_part)
    said = failing(ask("diagram"))
    assert any(words.startswith("all of x") for words in said)


def test_rows_that_do_not_sum_to_one_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def more(self: AttentionMatrix, **options: Any) -> Tensor:
        return dense(self, **options) * (1 + 1e-5)

    dense = AttentionMatrix.dense
    monkeypatch.setattr(AttentionMatrix, "dense", more)
    (said,) = failing(ask("diagram"))
    assert "rows of the maps" in said


def test_heads_in_another_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def turned(self: Attention, *inputs: Any, **options: Any) -> Tensor:
        return head_outputs(self, *inputs, **options).roll(1, 1)

    head_outputs = Attention.head_outputs
    monkeypatch.setattr(Attention, "head_outputs", turned)
    assert any("bit for bit" in words for words in failing(ask("diagram")))


def test_a_head_that_does_not_add_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_one(self: Attention, x: Tensor) -> Tensor:
        return contributions(self, x)[:, 1:]

    contributions = Attention.contributions
    monkeypatch.setattr(Attention, "contributions", without_one)
    (said,) = failing(ask("diagram"))
    assert "add up to the output" in said


def test_an_order_that_does_not_matter_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def alike(self: HeadwiseAttention, given: SharedWeights) -> Implementation:
        first = given.out[:, :HEAD_DIM].repeat(1, HEADS)
        return fill(
            self, SharedWeights.of_matrices((*given.matrices[:3], first), given.biases or ())
        )

    fill = HeadwiseAttention.load_weights
    monkeypatch.setattr(HeadwiseAttention, "load_weights", alike)
    assert any("reverse order" in words for words in failing(ask("diagram")))


def test_places_of_the_most_weight() -> None:
    before, after = torch.diag(torch.ones(3), -1), torch.diag(torch.ones(3), 1)
    before[0, 0] = after[-1, -1] = 1  # rows of those without such a neighbour
    third = torch.zeros(4, 4)
    third[:, 2] = 1
    blurred = before / 2 + 1 / 8
    found = diagram.strongest_head_of_each_target(
        torch.stack([after, blurred, third, before]), tuple("abcd")
    )
    assert {at["place"]: at["head"] for at in found} == {
        "c": 2,
        "the token before": 3,
        "the token after": 0,
    }
    # The token before is averaged over the tokens that have one: its first row does not count.
    assert [at["share"] for at in found] == [1, 1, 1]


def test_a_head_is_named_by_its_largest_share() -> None:
    one = torch.full((1, 3, 3), 0.25)
    one[0, :, 1] = 0.5
    (found,) = diagram.strongest_head_of_each_target(one, tuple("abc"))
    assert found == {"head": 0, "place": "b", "share": 0.5}
