"""Norms of the input or the output with weights of their own."""

import pytest
import torch
from torch import Tensor, nn

from headwise import Attention, Rotary
from headwise.diagnosis.attentions import Comparison
from headwise.diagnosis.probes import make_probes
from headwise.diagnosis.simulation.model import AttentionModel, ForcedStage
from headwise.diagnosis.subjects.function import BlackBox
from headwise.diagnosis.subjects.layers import NativeSubject
from headwise.function.records import STAGES
from headwise.identify.catalogue import CAUSES
from tests.diagnosis.causes.faulty_models import WIDTH, inputs_of, model_of, recorded, searched
from tests.quick import others_slow

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


class Inside(nn.Module):
    """An attention that normalises its input, as a class that nobody knows."""

    def __init__(self, layer: Attention, norm: nn.Module) -> None:
        super().__init__()
        self.layer, self.norm = layer, norm

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(self.norm(x))
        return output


@pytest.mark.slow
@pytest.mark.parametrize("kind", others_slow(["layer", "rms"]))
def test_a_norm_of_the_input_with_weights_is_read_off_a_function(kind: str) -> None:
    torch.manual_seed(5)
    layer = Attention(40, 5, rotary=Rotary())
    norm = nn.LayerNorm(40) if kind == "layer" else nn.RMSNorm(40, eps=1e-6)
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    first, second = BlackBox(Inside(layer, norm)), NativeSubject(layer)
    probes = make_probes([first, second], (40, 40))
    named = [each for each in CAUSES if each.name in LAST]
    diagnosis = Comparison(first, second, probes, named).diagnosis()
    assert diagnosis.function is not None
    [cause] = diagnosis.function.causes
    assert cause.name == "norm inside"
    assert cause.parameters == {"norm": f"{kind} of the input", "weights": "of its own"}


def test_a_norm_of_the_input_with_weights_is_read_off_stages() -> None:
    model, norm = model_of(), nn.LayerNorm(WIDTH, dtype=torch.float64)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.normal_(norm.bias)

    def normed(forced: ForcedStage) -> Tensor:
        normed = forced.with_inputs(x=norm(forced.call.inputs.x).detach())
        return STAGES[forced.stage].compute(normed)

    faulty = model
    for role in "qkv":
        faulty = faulty.with_stage_function(role, normed)
    [cause] = searched(model, recorded(faulty, inputs_of())).causes
    assert cause.cause.name == "norm inside"
    assert cause.variant.parameters == {"norm": "layer of the input", "weights": "of its own"}


@pytest.mark.slow
def test_a_norm_of_a_source_with_weights_is_read_off_a_function() -> None:
    torch.manual_seed(6)
    layer, norm = Attention(40, 5, source_dim=24), nn.LayerNorm(24)
    nn.init.uniform_(norm.weight, 0.5, 1.5)

    class Crossing(Inside):
        def forward(self, x: Tensor, source: Tensor) -> Tensor:
            output: Tensor = self.layer(x, self.norm(source))
            return output

    first, second = BlackBox(Crossing(layer, norm)), NativeSubject(layer)
    probes = make_probes([first, second], (40, 24))
    named = [each for each in CAUSES if each.name in LAST]
    diagnosis = Comparison(first, second, probes, named).diagnosis()
    assert diagnosis.function is not None
    [cause] = diagnosis.function.causes
    assert cause.parameters == {"norm": "layer of the source", "weights": "of its own"}
