"""Fit of one real number, so that a model predicts the recorded stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from headwise.diagnosis.causes.cause import Evidence, Family, Variant
from headwise.diagnosis.simulation.gaps import WHOLE, Cell
from headwise.diagnosis.simulation.stages import RecordedCall
from headwise.errors import OptionError

BEST_STARTS = 2
ROUNDS = 12
SHARES = (1.0, 0.25)  # of a step that is tried
BEYOND = 0.1  # of the span of the starts, which a fit may leave
STEP = 1e-5  # of the numerical derivative
MOST_ENTRIES = 20_000  # of residuals; more do not make the fit better


def fit_variant(family: Family, evidence: Evidence, cells: Sequence[Cell]) -> Variant | None:
    """Return the variant that is nearest to the recorded stages in these cells.

    Gauss and Newton's method from the best starts, with a numerical derivative: where a variant
    is exact, each round doubles the number of right digits.
    """
    heads: dict[tuple[str, int], list[int]] = {}
    for stage, number, head in cells:
        heads.setdefault((stage, number), []).append(head)

    def residuals(t: float) -> Tensor:
        variant = family.make(math.exp(t) if family.is_log else t)
        return _compute_residuals(variant, evidence.calls, heads)

    starts = [math.log(s) if family.is_log else s for s in family.starts]
    sizes = [(float(residuals(t).norm()), t) for t in starts]
    finite = sorted(pair for pair in sizes if math.isfinite(pair[0]))
    span = (max(starts) - min(starts)) * BEYOND
    bounds = (min(starts) - span, max(starts) + span)
    ends = [_minimise_residuals(residuals, size, t, bounds) for size, t in finite[:BEST_STARTS]]
    if not ends:
        return None
    _, t = min(ends)
    return family.make(math.exp(t) if family.is_log else t)


def _minimise_residuals(
    residuals: Callable[[float], Tensor], size: float, t: float, bounds: tuple[float, float]
) -> tuple[float, float]:
    for _ in range(ROUNDS):
        step = STEP * max(abs(t), 1.0)
        slope = (residuals(t + step) - residuals(t - step)) / (2 * step)
        steepness = float(slope.square().sum())
        if not steepness or not math.isfinite(steepness):
            break
        move = -float((slope * residuals(t)).sum()) / steepness
        move = max(min(move, bounds[1] - t), bounds[0] - t)
        trials = [(float(residuals(t + move * share).norm()), t + move * share) for share in SHARES]
        best = min(pair for pair in [*trials, (size, t)] if math.isfinite(pair[0]))
        if best[0] >= size:
            break
        size, t = best
    return size, t


def _compute_residuals(
    variant: Variant, calls: Sequence[RecordedCall], heads_of: Mapping[tuple[str, int], list[int]]
) -> Tensor:
    parts = []
    for (stage, number), heads in heads_of.items():
        actual = calls[number].stages[stage]
        try:
            predicted = variant.model.predict_stage(stage, calls[number])
        except OptionError:  # a number for which a scaling has no frequencies
            return torch.full((1,), math.inf, dtype=torch.float64)
        if predicted.shape != actual.shape:
            return torch.full((1,), math.inf, dtype=torch.float64)
        if WHOLE not in heads:
            predicted, actual = predicted[:, heads], actual[:, heads]
        apart = (predicted - actual).flatten()[:MOST_ENTRIES]
        parts.append(apart.masked_fill(~apart.isfinite(), 0.0))
    return torch.cat(parts)
