"""Two changes of a model are computed together, whatever they are: no pair of causes fails."""

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product

import pytest
import torch

from headwise import Attention, Rotary
from headwise.diagnosis.causes.evidence import Evidence
from headwise.diagnosis.causes.heads import merge_models
from headwise.diagnosis.pairs import ALONE
from headwise.diagnosis.simulation.model import AttentionModel, Inputs, RecordedCall
from headwise.diagnosis.subjects.layers import NativeSubject
from headwise.diagnosis.trials import Trial, Trials
from headwise.function.scaling import YarnScaling
from headwise.function.spec import AlibiRule, RotaryRule, Softcap
from headwise.identify.catalogue import BATCH_SEQUENCE_EXCHANGED, CAUSES, Cause
from tests.diagnosis.causes.faulty_models import gated, inputs_of, model_of, recorded
from tests.quick import others_extra

DRAWS = 4  # of the variants of two causes
PARTIAL = RotaryRule(10_000.0, 6, scaling=None)
MODELS: dict[str, Callable[[], AttentionModel]] = {
    "partial rotation": lambda: model_of(rotary=PARTIAL, causal=True, softcap=Softcap(5.0)),
    "window": lambda: model_of(causal=True, window=(3, 0)),
    "gate": gated,
}


def trials_of(model: AttentionModel, calls: list[RecordedCall]) -> dict[Cause, list[Trial]]:
    """Return the variants of each cause, and their parts, where no output agrees."""
    generator = torch.Generator().manual_seed(1)
    noisy = [
        replace(
            call,
            stages={
                "output": call.stages["output"]
                + torch.randn(call.stages["output"].shape, generator=generator).double()
            },
            earlier=tuple(replace(each, stages={}) for each in call.earlier),
        )
        for call in calls
    ]
    whole = Evidence.of(model, noisy)
    found = defaultdict(list)
    for evidence in (whole, replace(whole, fitted={}, is_limited=True)):
        trials = Trials(evidence, CAUSES)
        for cause in CAUSES:
            if cause not in ALONE and not cause.is_statistical:
                found[cause] += trials.of_cause(cause)
    return {cause: each for cause, each in found.items() if each}


@pytest.mark.parametrize(
    ("name", "steps"),
    others_extra([*((name, ()) for name in MODELS), ("partial rotation", (3, 1, 1))]),
)
def test_every_pair_of_causes_is_computed(name: str, steps: tuple[int, ...]) -> None:
    model = MODELS[name]()
    inputs = inputs_of(steps=steps)
    calls = recorded(model, replace(inputs, x=inputs.x[:, :5]))
    last = replace(calls[-1], stages={}, earlier=tuple(replace(c, stages={}) for c in calls[:-1]))
    found = trials_of(model, calls)
    draw, count, draws = random.Random(0), 0, DRAWS * (1 + 5 * bool(steps))
    for (first, second), _ in product(combinations(found, 2), range(draws)):
        sides = (draw.choice(found[cause]).variant.model for cause in (first, second))
        joined = merge_models(model, *sides)
        if joined is not None:
            output = joined.predict_stage("output", last)
            assert output.shape[:2] == last.inputs.x.shape[:2], (first.name, second.name)
            count += 1
    assert count > 500 * draws


def test_a_theta_and_a_scaling_without_frequencies_are_not_joined() -> None:
    model = model_of()
    scaled = model.with_rotary(scaling=YarnScaling(4.0, original_length=32768))
    assert merge_models(model, model.with_rotary(theta=1e5), scaled) is not None
    assert merge_models(model, model.with_rotary(theta=10.0), scaled) is None


def after(first: AttentionModel, calls: list[RecordedCall], *names: str) -> int:
    """Compute the variants of causes after a first one; return their number."""
    evidence = Evidence.of(first, calls)
    trials, count = Trials(evidence, CAUSES), 0
    for cause in CAUSES:
        for trial in trials.of_cause(cause) if cause.name in names else ():
            trials.explained_stages(trial)
            count += 1
    return count


def noisy_calls(model: AttentionModel) -> list[RecordedCall]:
    inputs = inputs_of()
    [call] = recorded(model, replace(inputs, x=inputs.x[:, :5]))
    noise = torch.randn(call.stages["output"].shape, generator=torch.Generator().manual_seed(1))
    return [call.with_stages({"output": call.stages["output"] + noise})]


def test_causes_after_the_batch_is_exchanged_with_the_sequence() -> None:
    """Scores are then (tokens, heads, batch, batch), and distances are not."""
    rule = AlibiRule(slopes=(0.5, 0.25, 0.125, 0.0625))
    model = model_of(softcap=Softcap(5.0), rotary=None, score_bias=rule)
    calls = noisy_calls(model)
    [exchanged, *_] = Trials(Evidence.of(model, calls), CAUSES).of_cause(BATCH_SEQUENCE_EXCHANGED)
    names = ("softcap", "batch and heads in another order")
    assert after(exchanged.variant.model, calls, *names) > 0


def test_heads_narrower_than_the_span_of_a_pair_are_not_tried() -> None:
    model = NativeSubject(Attention(32, 2, head_dim=16, rotary=Rotary(width=4))).model
    model = model.with_rotary(span=8)
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    calls = [RecordedCall(Inputs(x), {"output": torch.randn(2, 5, 32, dtype=torch.float64)})]
    assert after(model, calls, "number of heads") > 0
