"""Faults of one role, some heads or one kv head, where outputs alone are known."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.diagnosis.simulation.model import AttentionModel, ForcedStage, Inputs, RecordedCall
from headwise.function.rotary import rotate_by_rule
from headwise.function.spec import AlibiRule, Softcap
from tests.diagnosis.causes.faulty_models import (
    BATCH,
    HEADS,
    WIDTH,
    inputs_of,
    model_of,
    searched,
    with_function,
)

SLOPES = (0.5, 0.25, 0.125, 0.0625)


def outputs_of(model: AttentionModel) -> list[RecordedCall]:
    """Return calls of a model of which nothing but the output is known, one of them short."""
    generator = torch.Generator().manual_seed(9)
    few = Inputs(torch.randn(BATCH, 3, WIDTH, generator=generator, dtype=torch.float64))
    calls = [RecordedCall(inputs, {}) for inputs in (few, inputs_of())]
    return [call.with_stages({"output": model.predict_stage("output", call)}) for call in calls]


def in_heads(stage: str, heads: list[int], change: Callable[[ForcedStage], Tensor]) -> Any:
    """Return a change of some heads of a stage."""

    def changed(model: AttentionModel) -> AttentionModel:
        def function(forced: ForcedStage) -> Tensor:
            x = forced.usual_result().clone()
            x[:, heads] = change(forced)[:, heads]
            return x

        return model.with_stage_function(stage, function)

    return changed


def before_rotation(forced: ForcedStage) -> Tensor:
    return forced[f"{forced.stage[0]} after norm"]


def all_keys(forced: ForcedStage) -> Tensor:
    q, k = forced["q after rotary"], forced["k after rotary"]
    return forced.settings.factor * q @ k.repeat_interleave(2, 1).mT


def halved(forced: ForcedStage) -> Tensor:
    return forced.usual_result() / 2


def as_theta(theta: float) -> Callable[[ForcedStage], Tensor]:
    def rotated(forced: ForcedStage) -> Tensor:
        rule = replace(forced.settings.rotation, theta=theta)
        return rotate_by_rule(rule, before_rotation(forced), forced.call.query_positions)

    return rotated


@pytest.mark.parametrize(
    ("name", "role", "heads", "change", "settings"),
    [
        ("rotary missing", "k", None, in_heads("k after rotary", [0, 1], before_rotation), {}),
        (
            "rotary on some heads only",
            "q",
            (2,),
            in_heads("q after rotary", [2], before_rotation),
            {},
        ),
        (
            "rotary on some heads only",
            "k",
            (2, 3),
            in_heads("k after rotary", [1], before_rotation),
            {},
        ),
        (
            "rotary on some heads only",
            "",
            (1, 2, 3),
            lambda model: in_heads("k after rotary", [1], before_rotation)(
                in_heads("q after rotary", [1, 2, 3], before_rotation)(model)
            ),
            {},
        ),
        ("rotary theta", "q", None, in_heads("q after rotary", [0, 1, 2, 3], as_theta(500.0)), {}),
        ("rotary theta", "q", (1, 3), in_heads("q after rotary", [1, 3], as_theta(500.0)), {}),
        ("causal mask missing", "", (1,), in_heads("scores", [1], all_keys), {"causal": True}),
        ("window missing", "", (0, 2), in_heads("scores", [0, 2], all_keys), {"window": (4, None)}),
        ("scale", "", (3,), in_heads("scores", [3], halved), {}),
        ("softcap", "", (0,), in_heads("scores", [0], all_keys), {"softcap": Softcap(1.5)}),
        (
            "distance bias coefficient",
            "",
            (2, 3),
            in_heads("scores", [2, 3], all_keys),
            {"score_bias": AlibiRule(slopes=SLOPES), "rotary": None},
        ),
    ],
)
def test_the_part_is_named(
    name: str,
    role: str,
    heads: tuple[int, ...] | None,
    change: Callable[[AttentionModel], AttentionModel],
    settings: dict[str, object],
) -> None:
    model = model_of(**settings)
    [cause] = searched(model, outputs_of(change(model)), name).causes
    assert cause.cause.name == name
    assert cause.heads == heads
    assert cause.variant.parameters.get("role", "") == role
    assert (cause.variant.parameters.get("kv heads") == (1,)) == (heads == (2, 3) and role == "k")
    if name == "rotary on some heads only":  # it is said of the heads that have it
        rotated = tuple(n for n in range(HEADS) if n not in (heads or ()))
        assert cause.variant.details["rotated"] == rotated


def test_the_part_is_named_beside_a_head_that_gives_nothing() -> None:
    model = model_of(causal=True)
    wo = model.weights["wo"].clone()
    wo[0] = 0
    model = model.with_weights(wo=wo)
    faulty = in_heads("scores", [3], all_keys)(model)
    long = outputs_of(faulty)[1:]  # of which weights cannot be read off
    [cause] = searched(model, long, "causal mask missing").causes
    assert cause.heads == (3,)


@pytest.mark.slow
def test_a_fault_that_no_part_explains_is_not_named() -> None:
    noise = torch.randn(HEADS, 1, 1, generator=torch.Generator().manual_seed(3)).double()
    faulty = with_function(model_of(), "q after rotary", lambda q: q * (1 + 0.3 * noise))
    result = searched(model_of(), outputs_of(faulty), "scale", "rotary missing", "rotary theta")
    assert result.causes == ()


@pytest.mark.parametrize("has_sinks", [True, False])
def test_sinks_are_fitted_to_outputs(has_sinks: bool) -> None:
    right = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)
    model = model_of().with_weights(sink=right if has_sinks else None)
    other = right.roll(1) + 0.5
    [cause] = searched(model, outputs_of(model.with_weights(sink=other)), "sinks").causes
    assert cause.variant.parameters["sinks"] == pytest.approx(other.tolist(), abs=1e-5)


def test_slopes_are_fitted_to_outputs() -> None:
    model = model_of(score_bias=AlibiRule(slopes=SLOPES), rotary=None)
    slopes = torch.tensor([0.01, 0.3, 0.2, 0.9], dtype=torch.float64)
    calls = outputs_of(model.with_slopes(slopes))
    [cause] = searched(model, calls, "distance bias slope rule").causes
    assert cause.variant.parameters["slopes"] == pytest.approx(slopes.tolist(), abs=1e-5)
