"""Norms of the output with weights of their own, with a residual or without."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headwise.diagnosis.simulation.model import AttentionModel, ForcedStage
from tests.diagnosis.causes.faulty_models import WIDTH, inputs_of, model_of, recorded, searched

LAST = ("norm inside", "residual inside", "factor", "bias missing", "adapters merged or not")


def with_norm(model: AttentionModel, residual: float, noise: float = 0.0) -> AttentionModel:
    """Return the model with a layer norm of torch after the output."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.normal_(norm.bias)
    noises = noise * torch.randn(WIDTH, dtype=torch.float64)

    def normed(forced: ForcedStage) -> torch.Tensor:
        y: torch.Tensor = norm(forced.usual_result() + residual * forced.call.inputs.x)
        return (y + noises * y.square()).detach()

    return model.with_stage_function("output", normed)


@pytest.mark.parametrize(
    ("residual", "words"),
    [(0.0, "layer of the output"), (1.0, "layer of the output and the residual")],
)
def test_a_norm_with_weights(residual: float, words: str) -> None:
    model = model_of(causal=True)
    result = searched(model, recorded(with_norm(model, residual), inputs_of()), *LAST)
    assert [each.cause.name for each in result.causes] == ["norm inside"]
    assert result.causes[0].variant.parameters == {"norm": words, "weights": "of its own"}
    assert not result.left.cells_beyond_rounding


def test_beside_a_scale() -> None:
    model = model_of(causal=True)
    other = with_norm(model.with_settings(scale=0.2), 1.0)
    result = searched(model, recorded(other, inputs_of()), *LAST, "scale")
    assert {each.cause.name for each in result.causes} == {"norm inside", "scale"}


@pytest.mark.parametrize(("residual", "noise"), [(0.5, 0.0), (1.0, 1e-4)])
def test_other_functions_of_the_output(residual: float, noise: float) -> None:
    model = model_of(causal=True)
    other = with_norm(model, residual, noise)
    assert not searched(model, recorded(other, inputs_of()), *LAST).causes
