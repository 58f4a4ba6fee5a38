"""Fits of the numbers of one cause, or of two, to recorded stages.

Gauss and Newton's method from the best starts, with a numerical derivative: where a variant is
exact, each round doubles the number of right digits.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import product

import torch
from torch import Tensor

from headwise.diagnosis import watch
from headwise.diagnosis.causes.evidence import Family
from headwise.diagnosis.simulation.gaps import WHOLE, Cell
from headwise.diagnosis.simulation.model import AttentionModel, RecordedCall
from headwise.errors import OptionError

BEST_STARTS = 2
ROUNDS = 12
SHARES = (1.0, 0.25)  # of a step that is tried
BEYOND = 0.1  # of the span of the starts, which a fit may leave
STEP = 1e-5  # of the numerical derivative
SLOW = 0.5  # a round that leaves more of the residuals is not near an exact variant
MOST_ROUNDS = 4  # that may be slow, of a fit that is not quick
MOST_ENTRIES = 20_000  # of residuals; more do not make the fit better
Place = tuple[float, ...]  # the numbers of families, or their logarithms
Join = Callable[[Sequence[AttentionModel]], AttentionModel | None]


def fit_numbers(
    families: Sequence[Family],
    calls: Sequence[RecordedCall],
    cells: Iterable[Cell],
    *,
    starts: Sequence[Sequence[float]] = (),
    is_quick: bool = False,
    join: Join = lambda models: models[0],
) -> tuple[float, ...] | None:
    """Return the numbers, one of each family, whose models are nearest to these cells when joined.

    Without ``starts``, those of the families are tried. None where all residuals are infinite. A
    quick fit goes on from the best start alone, and ends with the first slow round.
    """
    heads = heads_by_stage(cells)

    @cache
    def residuals(place: Place) -> Tensor:
        watch.look()
        models = [f.make(n).model for f, n in zip(families, _numbers(families, place), strict=True)]
        return compute_residuals(join(models), calls, heads)

    ranges = [[math.log(s) if f.is_log else s for s in f.starts] for f in families]
    bounds = [_widen(min(each), max(each)) for each in ranges]
    places: list[Place] = [*product(*ranges)]
    if starts:
        places = [
            tuple(math.log(s) if f.is_log else s for f, s in zip(families, each, strict=True))
            for each in starts
        ]
    sizes = [(float(residuals(place).norm()), place) for place in places]
    finite = sorted(pair for pair in sizes if math.isfinite(pair[0]))
    best, most = finite[: 1 if is_quick else BEST_STARTS], 1 if is_quick else MOST_ROUNDS
    ends = [_minimise_residuals(residuals, *pair, bounds, most) for pair in best]
    return _numbers(families, min(ends)[1]) if ends else None


def heads_by_stage(cells: Iterable[Cell]) -> dict[tuple[str, int], list[int]]:
    """Return the heads of cells by stage and number of the call."""
    heads: dict[tuple[str, int], list[int]] = {}
    for stage, number, head in cells:
        heads.setdefault((stage, number), []).append(head)
    return heads


def _numbers(families: Sequence[Family], place: Place) -> tuple[float, ...]:
    numbers = [math.exp(t) if f.is_log else t for f, t in zip(families, place, strict=True)]
    return tuple(numbers)


def _widen(least: float, most: float) -> tuple[float, float]:
    span = (most - least) * BEYOND
    return least - span, most + span


def _minimise_residuals(
    residuals: Callable[[Place], Tensor],
    size: float,
    place: Place,
    bounds: Sequence[tuple[float, float]],
    most: int,
) -> tuple[float, Place]:
    slow = 0
    for _ in range(ROUNDS):
        columns = [_slope(residuals, place, axis) for axis in range(len(place))]
        if len({*map(len, columns)}) > 1:  # some numbers make stages of another shape
            break
        slopes = torch.stack(columns, 1)
        if not slopes.isfinite().all() or not slopes.any():
            break
        moves = torch.linalg.lstsq(slopes, -residuals(place)[:, None], driver="gelsd").solution
        trials = [(size, place)]
        for share in SHARES:
            ends = zip(place, moves[:, 0].tolist(), bounds, strict=True)
            there = tuple([max(min(t + share * m, high), low) for t, m, (low, high) in ends])
            trials.append((float(residuals(there).norm()), there))
        best = min([pair for pair in trials if math.isfinite(pair[0])])
        if best[0] >= size:
            break
        slow += best[0] > SLOW * size
        size, place = best
        if slow == most:
            break
    return size, place


def _slope(residuals: Callable[[Place], Tensor], place: Place, axis: int) -> Tensor:
    step = STEP * max(abs(place[axis]), 1.0)
    ahead, behind = (
        tuple(t + sign * step if n == axis else t for n, t in enumerate(place)) for sign in (1, -1)
    )
    return (residuals(ahead) - residuals(behind)) / (2 * step)


def compute_residuals(
    model: AttentionModel | None,
    calls: Sequence[RecordedCall],
    heads_of: Mapping[tuple[str, int], list[int]],
) -> Tensor:
    """Return the differences of recorded entries from a model's; one infinity for other shapes.

    Without a model, that infinity is returned too.
    """
    parts = []
    for (stage, number), heads in heads_of.items():
        actual = calls[number].stages[stage]
        predicted = None
        with suppress(OptionError):  # a number for which a scaling has no frequencies
            predicted = None if model is None else model.predict_stage(stage, calls[number])
        if predicted is None or predicted.shape != actual.shape:
            return torch.full((1,), math.inf, dtype=torch.float64)
        if WHOLE not in heads:
            predicted, actual = predicted[:, heads], actual[:, heads]
        apart = (predicted - actual).flatten()[:MOST_ENTRIES]
        parts.append(apart.masked_fill(~apart.isfinite(), 0.0))
    return torch.cat(parts)
