"""Cause of differential attention: another factor of the softmax that is subtracted."""

import math
from dataclasses import replace

import torch

from headwise.diagnosis.causes.evidence import Evidence, Family, Variant, Variants
from headwise.diagnosis.simulation.model import AttentionModel
from headwise.function.differential import difference_factor, usual_init
from headwise.function.weights import LAMBDAS
from headwise.identify.catalogue import POSSIBLE

MOST_LAYERS = 64  # whose constants are tried
STARTS = (0.0, 0.2, 0.4, 0.8, 1.6)


def _difference_factor(evidence: Evidence) -> Variants:
    model, rule = evidence.model, evidence.model.settings.pairs
    if rule is None:
        return
    for layer in range(MOST_LAYERS):
        if not math.isclose(init := usual_init(layer), float(rule.init), rel_tol=1e-6):
            changed = model.with_settings(differential=replace(rule, init=init))
            repair = f"lambda_init={rule.init:.9g}"
            yield Variant(changed, {"lambda_init": init}, repair, {"of": f"layer {layer}, from 0"})
    right = difference_factor(rule, *(model.weights[name] for name in LAMBDAS)).item()
    repair = f"load lambda_q1, lambda_k1, lambda_q2 and lambda_k2: the factor is {right:.9g}"

    def make(factor: float) -> Variant:
        return Variant(_with_factor(model, factor), {"factor": factor}, repair, rank=POSSIBLE)

    yield replace(make(float(rule.init)), details={"of": "lambda_init alone"})
    yield Family(make, STARTS)


def _with_factor(model: AttentionModel, factor: float) -> AttentionModel:
    """Return the model with vectors that make this factor: the other pair of them is 0."""
    rule = model.settings.pairs
    assert rule is not None
    change = factor - float(rule.init)
    logs = torch.tensor([max(change, 0.0), max(-change, 0.0)], dtype=torch.float64).log1p()
    vectors = (logs[:1], torch.ones_like(logs[:1]), logs[1:], torch.ones_like(logs[:1]))
    return model.with_weights(**dict(zip(LAMBDAS, vectors, strict=True)))
