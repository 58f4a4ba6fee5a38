"""Comparison of the gradients of two attentions whose outputs agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from headwise.diagnosis.attention_comparison_result import GradientGap
from headwise.diagnosis.probe_inputs import SEED
from headwise.diagnosis.simulation.stages import Inputs
from headwise.diagnosis.subjects.model_run_result import relative_difference_norm
from headwise.diagnosis.subjects.subject import Subject
from headwise.error_budget.budget import BACKWARD


def compare_gradients(
    first: Subject, second: Subject, probes: Sequence[Inputs], *, with_weights: bool
) -> tuple[GradientGap, ...]:
    """Compare the gradients of inputs and, ``with_weights``, of the weights that both have.

    Each gradient is that of the sum of output * direction, where the direction is random. The
    worst of all probes is reported.

    Raises:
        OptionError: the gradients of one cannot be had.
    """
    worst: dict[str, GradientGap] = {}
    for inputs in probes:
        for gap in _yield_gradient_gaps(first, second, inputs, with_weights=with_weights):
            known = worst.setdefault(gap.name, gap)
            if gap.size * known.allowed > known.size * gap.allowed:
                worst[gap.name] = gap
    return tuple(worst.values())


def _yield_gradient_gaps(
    first: Subject, second: Subject, inputs: Inputs, *, with_weights: bool
) -> Iterator[GradientGap]:
    shape = second.output(inputs).shape
    generator = torch.Generator().manual_seed(SEED)
    direction = torch.randn(shape, generator=generator, dtype=torch.float64)
    wide, narrow = (
        [subject.gradients(inputs, direction, dtype) for subject in (first, second)]
        for dtype in (torch.float64, torch.float32)
    )
    for name in wide[0].keys() & wide[1].keys():
        if not with_weights and name not in ("x", "source"):
            continue
        rounding = max(
            relative_difference_norm(n[name], w[name]) for n, w in zip(narrow, wide, strict=True)
        )
        size = relative_difference_norm(wide[0][name], wide[1][name])
        yield GradientGap(name=name, size=size, allowed=BACKWARD * rounding)
