"""The order of axes: each fact turns when the library, or what is given, is otherwise."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.errors import ShapeError
from headwise.layers.attention import Attention
from headwise.layers.torch_api.layer import MultiheadAttention
from headwise.masks.mask import Mask
from headwise.study.question import Answer
from headwise.study.questions import axis_order
from tests.study.asking import ask


@pytest.fixture(autouse=True)
def _untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        axis_order, "length_first_relative_times", lambda kind: {"infer": 1.0, "train": 1.0}
    )


def asked() -> Answer:
    return ask("axis-order")


def assert_fails(answer: Answer, *facts: int) -> None:
    """These facts do not hold, the others do, and the verdict says so."""
    failed = [number for number, (held, _) in enumerate(answer.facts) if not held]
    assert failed == list(facts), answer.verdict
    assert all(answer.facts[number][1] in answer.verdict for number in failed)


def use(monkeypatch: pytest.MonkeyPatch, layer: type[MultiheadAttention]) -> None:
    monkeypatch.setitem(axis_order.LAYERS, "headwise", layer)


def test_outputs_that_hang_on_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reversed(MultiheadAttention):
        """Length first, it returns the sequences of the batch in the other order."""

        def forward(self, *args: Any, **options: Any) -> Any:
            output, weights = super().forward(*args, **options)
            return output if self.batch_first else output.flip(1), weights

    use(monkeypatch, Reversed)
    assert_fails(asked(), 0, 3)


@pytest.mark.parametrize("name", ["torch", "headwise"])
def test_a_layer_that_refuses_a_tensor_for_its_sizes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = axis_order.LAYERS[name]

    class Suspicious(own):  # type: ignore[valid-type, misc]
        def forward(self, query: Tensor, *args: Any, **options: Any) -> Any:
            if not self.batch_first and query.shape[0] < query.shape[1]:
                raise RuntimeError("saw: more sequences than tokens")
            return super().forward(query, *args, **options)

    monkeypatch.setitem(axis_order.LAYERS, name, Suspicious)
    answer = asked()
    assert_fails(answer, 1, 3, *([6] if name == "torch" else []))
    assert answer.numbers["told"][name]["alone"] == "error"


def test_a_native_layer_that_knows_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses where x is no tensor of its own order."""
    own = Attention.forward

    def knowing(self: Attention, x: Tensor, **options: Any) -> Tensor:
        if not x.is_contiguous():
            raise ShapeError(saw="a transposed x", needed="batch first", do="transpose it")
        return own(self, x, **options)

    monkeypatch.setattr(Attention, "forward", knowing)
    assert_fails(asked(), 1, 5)


def test_a_layer_that_attends_across_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    class LengthFirst(MultiheadAttention):
        """Built for one order, it takes the other."""

        def __init__(self, *args: Any, batch_first: bool = False) -> None:
            super().__init__(*args, batch_first=False)

    use(monkeypatch, LengthFirst)
    assert_fails(asked(), 2)


def test_a_layer_that_finds_the_batch_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class BatchFirst(MultiheadAttention):
        def __init__(self, *args: Any, batch_first: bool = False) -> None:
            super().__init__(*args, batch_first=True)

    use(monkeypatch, BatchFirst)
    assert_fails(asked(), 3, 4)


def test_masks_whose_sizes_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Careless(MultiheadAttention):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
            options.pop("attn_mask", None)
            return super().forward(query, key, value, **options)

    use(monkeypatch, Careless)
    assert_fails(asked(), 4)


def test_lengths_that_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mask, "lengths", lambda **_: Mask())
    assert_fails(asked(), 4)


def test_a_batch_that_may_not_be_as_long_as_its_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    class Strict(MultiheadAttention):
        def forward(self, query: Tensor, *args: Any, **options: Any) -> Any:
            if query.shape[0] == query.shape[1]:
                raise RuntimeError("which is the batch?")
            return super().forward(query, *args, **options)

    use(monkeypatch, Strict)
    assert_fails(asked(), 5)


def test_weights_of_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    class PerHead(nn.MultiheadAttention):
        def forward(self, *args: Any, **options: Any) -> Any:
            return super().forward(*args, **options, average_attn_weights=False)

    monkeypatch.setitem(axis_order.LAYERS, "torch", PerHead)
    assert_fails(asked(), 6)


# ---- what it measures with -----------------------------------------------------------------------


def test_influence_is_the_size_of_the_derivative() -> None:
    class Mix(nn.Module):
        """The second token of each sequence is three times the first, in every number."""

        def forward(self, x: Tensor, *_: Tensor, need_weights: bool) -> tuple[Tensor, None]:
            return torch.stack([x[:, 0], 3 * x[:, 0]], dim=1), None

    found = axis_order.measure_influence(Mix(), torch.randn(2, 2, 4))
    first, second = 2.0, 6.0  # the norm of four ones, and of four threes, on a diagonal
    assert found.tolist() == [
        [first, 0, 0, 0],
        [second, 0, 0, 0],
        [0, 0, first, 0],
        [0, 0, second, 0],
    ]


def test_an_outcome_is_what_was_returned_or_what_the_error_asks_for() -> None:
    def refuse() -> None:
        raise ShapeError(saw="a tensor", needed="another", do="pass it")

    accepted, refused = (
        axis_order.result_or_error(lambda: (1, 2)),
        axis_order.result_or_error(refuse),
    )
    assert accepted.result == (1, 2)
    assert accepted.answer == "accepted"
    assert refused.message == "needed: another"
    assert refused.answer == "error"


def test_reach_counts_tokens_of_its_own_sequence_and_of_others() -> None:
    tokens = axis_order.BATCH * axis_order.LENGTH
    found = torch.eye(tokens)
    found[0, 1] = found[0, -1] = found[0, -2] = 0.5
    found[0, axis_order.LENGTH] = 0.5
    assert axis_order.least_and_most_dependencies_per_output(found) == {
        "own": [1, 2],
        "others": [0, 3],
        "position": [1, 2],
    }
