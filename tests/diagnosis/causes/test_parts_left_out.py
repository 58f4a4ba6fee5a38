"""Temperature, clip, values and norms of head outputs: what is left out, or counted otherwise."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise import Attention, Rotary, compare
from headwise.diagnosis.causes.rotary import _warm_by_column
from headwise.diagnosis.simulation.model import Inputs, RecordedCall
from headwise.diagnosis.subjects.layers import NativeSubject
from headwise.function.differential import usual_init
from headwise.function.spec import DifferentialRule, TemperatureRule, ValueRule
from headwise.function.temperature import query_factors
from headwise.layers.norm import QKNorm

BATCH, LENGTH, EMBED, HEADS = 3, 19, 40, 6
RULE = TemperatureRule(0.4, 5)
PARTS: dict[str, dict[str, Any]] = {
    "clip": {"clip": 0.4},
    "values": {"values": ValueRule(eps=1e-6)},
    "output norm": {"output_norm": QKNorm(over="width")},
    "differential": {"differential": DifferentialRule(usual_init(2), 1e-5)},
}


def layer(**options: Any) -> Attention:
    torch.manual_seed(0)
    made = Attention(EMBED, HEADS, head_dim=10, num_kv_heads=2, rotary=Rotary(500.0), **options)
    with torch.no_grad():
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=0.3)
    return made.requires_grad_(False)


def tokens() -> Tensor:
    return torch.randn(BATCH, LENGTH, EMBED, generator=torch.Generator().manual_seed(1))


def pair(options: dict[str, Any], **others: Any) -> tuple[Attention, Attention]:
    """The layer, and one with the same weights and other options."""
    right = layer(**options)
    wrong = layer(**options | others)
    wrong.load_state_dict(
        {name: x for name, x in right.state_dict().items() if name in wrong.state_dict()}
    )
    return right, wrong


def causes(first: nn.Module, second: nn.Module) -> list[Any]:
    diagnosis = compare(second, first, tokens())
    assert diagnosis.function is not None
    return [*diagnosis.function.causes]


def test_layers_that_are_counted_from_1_are_named() -> None:
    right, wrong = (DifferentialRule(usual_init(number), 1e-5) for number in (2, 3))
    [cause] = causes(*pair({"differential": right}, differential=wrong))
    assert cause.name == "factor of a difference"
    assert cause.parameters == {"lambda_init": usual_init(3), "of": "layer 3, from 0"}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_is_left_out_is_named(part: str) -> None:
    options = PARTS[part]
    [cause] = causes(*pair(options, **dict.fromkeys(options)))
    assert (cause.name, cause.parameters) == ("part left out", {"part": part})


@pytest.mark.parametrize(
    ("other", "parameters"),
    [
        (None, {"temperature": "none"}),
        (TemperatureRule(0.4, 5, first=1), {"temperature": "steps", "first position": 1}),
        (TemperatureRule(0.4, 5, kind="smooth"), {"temperature": "smooth", "first position": 0}),
    ],
)
def test_a_temperature_that_is_another_is_named(other: Any, parameters: dict[str, Any]) -> None:
    [cause] = causes(*pair({"temperature": RULE}, temperature=other))
    assert (cause.name, cause.parameters) == ("temperature of queries", parameters)


def test_a_temperature_by_column_counts_the_padding() -> None:
    right, x = layer(temperature=RULE).double(), tokens().double()
    positions = (torch.arange(LENGTH) - 4).clamp(min=0).expand(BATCH, -1)
    call = RecordedCall(Inputs(x, positions=positions), {})
    forced = NativeSubject(right).model.prepare_stage("q after rotary", call)
    plain = NativeSubject(layer().double()).model.predict_stage("q after rotary", call)
    columns = query_factors(RULE, torch.arange(LENGTH), torch.float64)
    torch.testing.assert_close(_warm_by_column(forced), plain * columns, rtol=1e-12, atol=1e-13)
    by_position = plain * query_factors(RULE, positions, torch.float64)
    torch.testing.assert_close(forced.result, by_position, rtol=1e-12, atol=1e-13)
