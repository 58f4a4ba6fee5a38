"""Models with faults that no cause made, and the causes that a search names for them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headwise.diagnosis.causes.evidence import Evidence
from headwise.diagnosis.explained import CauseSearchResult, search_causes
from headwise.diagnosis.simulation.model import AttentionModel, ForcedStage, Inputs, RecordedCall
from headwise.function.spec import AttentionSpec, RotaryRule
from headwise.identify.catalogue import CAUSES

HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM, WIDTH = 4, 2, 10, 6, 26
TOKENS, BATCH = 18, 3
SPREAD = {"wq": 0.5, "wk": 0.5}


def model_of(**settings: object) -> AttentionModel:
    """Return a model with random weights and a rotation, whose sizes are all different."""
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "wq": (HEADS, HEAD_DIM, WIDTH),
        "wk": (KV_HEADS, HEAD_DIM, WIDTH),
        "wv": (KV_HEADS, VALUE_DIM, WIDTH),
        "wo": (HEADS, VALUE_DIM, WIDTH),
        "bq": (HEADS, HEAD_DIM),
        "bk": (KV_HEADS, HEAD_DIM),
        "bv": (KV_HEADS, VALUE_DIM),
        "bo": (WIDTH,),
    }
    weights = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * SPREAD.get(name, 0.3)
        for name, shape in shapes.items()
    }
    plain = AttentionSpec(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rotary=RotaryRule(10_000.0, HEAD_DIM, scaling=None),
    )
    return AttentionModel(plain, weights).with_settings(**settings)


def gated() -> AttentionModel:
    """Return a model with a gate for each channel of a head."""
    generator = torch.Generator().manual_seed(2)
    gate = torch.randn(HEADS, VALUE_DIM, WIDTH, generator=generator, dtype=torch.float64)
    return model_of(output_gate="channel").with_weights(wg=0.3 * gate)


def inputs_of(**arguments: object) -> Inputs:
    """Return random tokens."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(BATCH, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    return Inputs(x, **arguments)  # type: ignore[arg-type]


def recorded(model: AttentionModel, inputs: Inputs) -> list[RecordedCall]:
    """Return the calls of a model with all their stages."""
    calls: list[RecordedCall] = []
    for chunk in inputs.per_call:
        call = RecordedCall(chunk, {}, earlier=tuple(calls) if inputs.steps else ())
        calls.append(call.with_stages(model.predict_all_stages(call)))
    return calls


def searched(
    model: AttentionModel, calls: Sequence[RecordedCall], *names: str
) -> CauseSearchResult:
    """Return what a search among the causes of these names gives; among all for no name."""
    chosen = [each for each in CAUSES if not names or each.name in names]
    return search_causes(Evidence.of(model, calls), chosen)


def with_function(
    model: AttentionModel, stage: str, function: Callable[[Tensor], Tensor]
) -> AttentionModel:
    """Return the model with a function after a stage."""

    def applied(forced: ForcedStage) -> Tensor:
        return function(forced.usual_result())

    return model.with_stage_function(stage, applied)
