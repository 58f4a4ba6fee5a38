"""Layers that take (batch, tokens, width) as (tokens, batch, width)."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from headwise import compare
from headwise.diagnosis.simulation.model import AttentionModel, Inputs, RecordedCall
from tests.diagnosis.causes.faulty_models import (
    BATCH,
    inputs_of,
    model_of,
    recorded,
    searched,
    with_function,
)

NAME = "batch and sequence exchanged"
FAMILY = (NAME, "rotary axis", "softmax axis", "scale", "causal alignment", "rotary missing")


def read_wrongly(model: AttentionModel, inputs: Inputs) -> RecordedCall:
    """Return what is recorded of a layer that reads the tokens as a batch."""
    stages = model.predict_all_stages(RecordedCall(Inputs(inputs.x.transpose(0, 1)), {}))
    by_token = {
        name: x if name in ("scores", "weights") else x.transpose(0, 1 if x.dim() == 3 else 2)
        for name, x in stages.items()
    }
    return RecordedCall(inputs, by_token)


@pytest.mark.parametrize("causal", [True, False])
def test_a_layer_without_batch_first(causal: bool) -> None:
    model = model_of(causal=causal)
    result = searched(model, [read_wrongly(model, inputs_of())], *FAMILY)
    assert [each.cause.name for each in result.causes] == [NAME]
    assert not result.left.cells_beyond_rounding


def test_beside_a_scale() -> None:
    model = model_of(rotary=None)
    calls = [read_wrongly(model.with_settings(scale=0.2), inputs_of())]
    result = searched(model, calls, *FAMILY)
    assert {each.cause.name for each in result.causes} == {NAME, "scale"}


@pytest.mark.slow
def test_a_function_of_torch_without_batch_first() -> None:
    torch.manual_seed(0)
    original = nn.MultiheadAttention(24, 3, batch_first=True)
    ported = nn.MultiheadAttention(24, 3).eval()
    ported.load_state_dict(original.state_dict())
    x = torch.randn(3, 9, 24)
    diagnosis = compare(lambda x: ported(x, x, x)[0], original, x)
    assert diagnosis.function is not None
    assert [cause.name for cause in diagnosis.function.causes] == [NAME]


def softmax_over_the_batch(model: AttentionModel) -> list[RecordedCall]:
    return recorded(
        model.with_stage_function("weights", lambda f: f["scores"].softmax(0)), inputs_of()
    )


def averaged_over_the_batch(model: AttentionModel) -> list[RecordedCall]:
    def mean(q: Tensor) -> Tensor:
        return q.mean(0, keepdim=True).expand(BATCH, -1, -1, -1)

    return recorded(with_function(model, "scores", mean), inputs_of())


def one_sequence_before(model: AttentionModel) -> list[RecordedCall]:
    return recorded(with_function(model, "head outputs", lambda x: x.roll(1, 0)), inputs_of())


def with_a_gate(model: AttentionModel) -> list[RecordedCall]:
    call = read_wrongly(with_function(model, "scores", lambda s: s.sin()), inputs_of())
    return [call]


@pytest.mark.parametrize(
    "calls",
    [softmax_over_the_batch, averaged_over_the_batch, one_sequence_before, with_a_gate],
)
def test_other_exchanges_of_the_batch(
    calls: Callable[[AttentionModel], list[RecordedCall]],
) -> None:
    model = model_of()
    names = [each.cause.name for each in searched(model, calls(model), *FAMILY).causes]
    assert NAME not in names
