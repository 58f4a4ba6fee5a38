"""Two changes of a model are computed together, whatever they are: no pair of causes fails."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product

import pytest
import torch

from headwise.diagnosis.catalogue import CAUSES, Cause
from headwise.diagnosis.causes.evidence import Evidence
from headwise.diagnosis.pairs import ALONE
from headwise.diagnosis.simulation.merging import merge_models
from headwise.diagnosis.simulation.model import AttentionModel, RecordedCall
from headwise.diagnosis.trials import Trial, Trials
from headwise.function.spec import RotaryRule, Softcap
from tests.diagnosis.causes.faulty_models import gated, inputs_of, model_of, recorded

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


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_pair_of_causes_is_computed(name: str) -> None:
    model = MODELS[name]()
    inputs = inputs_of()
    calls = recorded(model, replace(inputs, x=inputs.x[:, :5]))
    found = trials_of(model, calls)
    draw, count = random.Random(0), 0
    for (first, second), _ in product(combinations(found, 2), range(DRAWS)):
        sides = (draw.choice(found[cause]).variant.model for cause in (first, second))
        joined = merge_models(model, *sides)
        if joined is not None:
            output = joined.predict_stage("output", replace(calls[0], stages={}))
            assert output.shape[:2] == calls[0].inputs.x.shape[:2], (first.name, second.name)
            count += 1
    assert count > 500 * DRAWS
