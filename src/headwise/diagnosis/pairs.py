"""Pairs of causes that explain a stage only together.

First comes what one cause explains where the other cannot show: in the smallest call there may be
no mask, and no key beyond a window. Where both show in it, changes of the model are joined two by
two, and tried on this call alone. The nearest causes are last, each followed by a search of its
own, for causes that are read off the data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property, partial
from itertools import combinations, product
from typing import Any

from torch import Tensor

from headwise.diagnosis import catalogue, watch
from headwise.diagnosis.catalogue import Cause
from headwise.diagnosis.causes.evidence import Evidence, Variant
from headwise.diagnosis.fit import compute_residuals, fit_numbers, heads_by_stage
from headwise.diagnosis.simulation import gaps
from headwise.diagnosis.simulation.gaps import Cell, measure_gaps
from headwise.diagnosis.simulation.model import AttentionModel
from headwise.diagnosis.trials import (
    NamedCause,
    Trial,
    Trials,
    find_best_single_cause,
    is_cell_explained,
    recorded_stages_of,
)

MOST_FIRSTS = 12  # that explain the smallest call
MOST_OF_A_CAUSE = 6
ALONE = {catalogue.BATCH_SEQUENCE_EXCHANGED, catalogue.NUMBER_OF_HEADS}  # change all shapes
MOST_ALIKE = 8  # variants that look the same in the smallest call
NEAREST = 5
DIGITS = 4  # of predicted stages that look the same


def find_best_pair(
    evidence: Evidence, causes: Sequence[Cause], firsts: Sequence[Trial]
) -> list[NamedCause]:
    """Return two causes that explain a stage together, or nothing.

    ``firsts`` explain the smallest call alone. One cause twice is no pair: that undoes what the
    first did, and is another name for anything. A statistical cause is in none: it would explain
    whatever a cause that replaces weights leaves.
    """
    stage = evidence.gaps.stages_beyond_rounding[0]
    concerned = [
        cause
        for cause in causes
        if not cause.is_statistical and stage in recorded_stages_of(cause, evidence)
    ]
    pairs = _Pairs(evidence, stage, concerned)
    firsts = [trial for trial in firsts if trial.cause in concerned]
    ordered = sorted(firsts, key=lambda trial: trial.cost)[:MOST_FIRSTS]
    return pairs.after(ordered) or pairs.joined() or pairs.after(pairs.nearest())


@dataclass(eq=False)
class _Pairs:
    """Pairs of causes that show in a stage that parts."""

    evidence: Evidence
    stage: str
    causes: Sequence[Cause]

    @cached_property
    def trials(self) -> Trials:
        return Trials(self.evidence, self.causes)

    @cached_property
    def every(self) -> list[Trial]:
        """All variants."""
        return [trial for cause in self.causes for trial in self.trials.of_cause(cause)]

    def after(self, firsts: Iterable[Trial]) -> list[NamedCause]:
        """Return the best pair whose second cause is found after the first."""
        pairs = list[list[NamedCause]]()
        for trial in firsts:
            watch.look(f"trying pairs with {trial.cause.name}")
            pair = self._second_of(trial) if trial.family is None else self._second_nearest(trial)
            pairs += [pair] if pair else []
        return min(pairs, key=lambda pair: pair[1].sort_key, default=[])

    def _second_of(self, first: Trial) -> list[NamedCause]:
        """Return a pair with the cause that a search of its own names after the first."""
        parted = tuple(self.evidence.parted_calls_and_heads(self.stage))
        others = [each for each in self.causes if each is not first.cause]
        left = Evidence.of(first.variant.model, self.evidence.calls)
        for second in find_best_single_cause(left, others)[0]:
            if self._explains(second.model):
                alone = NamedCause(first.cause, first.variant, first.variant.model, parted)
                return _as_pair(alone, second)
        return []

    def _second_nearest(self, first: Trial) -> list[NamedCause]:
        """Return a pair with one of the nearest causes where the first explains nothing.

        The number of the first is fitted again with it: small calls tell few of its digits.
        """
        evidence = self.evidence
        parted = evidence.parted_calls_and_heads(self.stage)
        first, number = self._grown(first)
        cells = [cell for cell in parted if cell[1] == number]
        ranked = []
        for place, second in enumerate(self.every):
            if second.cause in ALONE:
                continue
            model = merge_models(evidence.model, first.variant.model, second.variant.model)
            if second.cause is not first.cause and model is not None:
                size = compute_residuals(model, evidence.calls, heads_by_stage(cells)).norm()
                ranked.append((float(size), place, second))
        for _, _, second in sorted(ranked)[:NEAREST]:
            starts = [t.number for t in (first, second) if t.family is not None]
            fitted = self._fitted([first, second], parted, [starts])
            if fitted is not None and self._explains(fitted[2].variant.model):
                return self._name(*fitted)
        return []

    def _grown(self, trial: Trial) -> tuple[Trial, int]:
        """Return a trial fitted to larger and larger calls, and the first that it leaves."""
        evidence = self.evidence
        parted = evidence.parted_calls_and_heads(self.stage)
        sizes = {n: evidence.calls[n].inputs.x.numel() for _, n, _ in parted}
        for number in sorted(sizes, key=sizes.__getitem__):
            heads = [head for _, n, head in parted if n == number]
            cells = [(self.stage, number, head) for head in heads]
            nearer = trial.fitted_to(evidence.calls, cells, only=True)
            call = evidence.calls[number]
            if not gaps.all_heads_agree_within_rounding(
                nearer.variant.model, call, self.stage, heads
            ):
                return trial, number
            trial = nearer
        return trial, number

    def _explains(self, model: AttentionModel) -> bool:
        """True if every cell of the stage that parts is explained, and no other parts then."""
        evidence = self.evidence
        after = measure_gaps(model, evidence.calls, [self.stage])
        parted = evidence.parted_calls_and_heads(self.stage)
        return not {*after.cells_beyond_rounding} - {*parted} and all(
            is_cell_explained(cell, evidence.gaps, after) for cell in parted
        )

    def nearest(self) -> list[Trial]:
        """Return the variants that leave least of the smallest call, and those that are steps."""
        steps = [trial for trial in self.every if trial.variant.is_step]
        others = (trial for trial in self.every if not trial.variant.is_step)
        return [*steps, *sorted(others, key=self._left_in_smallest_call)][:NEAREST]

    def joined(self) -> list[NamedCause]:
        """Return two changes of the model that explain the stage together."""
        small = self.trials.smallest[self.stage]
        parted = self.evidence.parted_calls_and_heads(self.stage)
        pairs = [(a, b) for a, b in combinations(self._groups, 2) if a[0].cause is not b[0].cause]
        pairs.sort(key=lambda pair: pair[0][0].cost + pair[1][0].cost)
        for number, groups in enumerate(pairs):
            names = " and ".join(group[0].cause.name for group in groups)
            watch.look(f"trying {names}", number, len(pairs))
            fitted = self._fitted([group[0] for group in groups], small.cells)
            if fitted is None or not self.trials.explains_smallest_call(fitted[2], self.stage):
                continue
            for pair in product(*(group[:MOST_ALIKE] for group in groups)):
                numbers = [t.number for t in fitted[:2] if t.family is not None]
                whole = self._fitted(pair, parted, starts=[numbers] if numbers else [])
                if whole is not None and self._explains(whole[2].variant.model):
                    return self._name(*whole)
        return []

    def _name(self, first: Trial, second: Trial, both: Trial) -> list[NamedCause]:
        parted = tuple(self.evidence.parted_calls_and_heads(self.stage))
        alone = NamedCause(first.cause, first.variant, first.variant.model, parted)
        return _as_pair(alone, NamedCause(second.cause, second.variant, both.variant.model, parted))

    @cached_property
    def _groups(self) -> list[list[Trial]]:
        """Variants that change the smallest call; those that look the same there are together.

        Of each cause the nearest ones are taken, without those that change shapes.
        """
        small, base = self.trials.smallest[self.stage], self.evidence.model
        usual = base.predict_stage(self.stage, small.call)
        unit = 10.0**-DIGITS * usual.abs().nan_to_num(0.0, posinf=0.0).amax()
        groups: dict[object, list[Trial]] = {}
        for trial in self.every:
            model = trial.variant.model
            predicted = model.predict_stage(self.stage, small.call)
            if trial.cause in ALONE or predicted.shape != usual.shape:
                continue
            if trial.family is not None:
                groups[len(groups)] = [trial]
            elif bool((gaps.absolute_difference(predicted, usual) > small.bound).any()):
                key = trial.cause, (predicted / unit).round().numpy().tobytes()
                groups.setdefault(key, []).append(trial)
        ranked: dict[Cause, list[tuple[tuple[float, float], int, list[Trial]]]] = {}
        for number, group in enumerate(groups.values()):
            each = ranked.setdefault(group[0].cause, [])
            each.append((self._left_in_smallest_call(group[0]), number, group))
        chosen = [group for each in ranked.values() for *_, group in sorted(each)[:MOST_OF_A_CAUSE]]
        return sorted(chosen, key=lambda group: group[0].cost)

    def _left_in_smallest_call(self, trial: Trial) -> tuple[float, float]:
        """Return the share of entries that a variant leaves in the smallest call, and the norm."""
        small = self.trials.smallest[self.stage]
        predicted = trial.variant.model.predict_stage(self.stage, small.call)
        actual = small.call.stages[self.stage]
        if predicted.shape != actual.shape:
            return math.inf, math.inf
        apart = gaps.absolute_difference(predicted, actual)
        share = float((apart > small.bound).double().mean())
        return share, float(apart.masked_fill(apart.isinf(), 0.0).norm())

    def _fitted(
        self, pair: Sequence[Trial], cells: Sequence[Cell], starts: Sequence[Sequence[float]] = ()
    ) -> tuple[Trial, Trial, Trial] | None:
        """Return two trials with numbers that fit together, and the trial of the joined model."""
        families = [trial.family for trial in pair if trial.family is not None]
        if families:
            join = partial(self._join, pair)
            is_quick = len(families) == 1 and not starts
            numbers = fit_numbers(
                families, self.evidence.calls, cells, starts=starts, is_quick=is_quick, join=join
            )
            if numbers is None:
                return None
            each = iter(numbers)
            pair = [t if t.family is None else t.with_number(next(each)) for t in pair]
        model = merge_models(self.evidence.model, *(trial.variant.model for trial in pair))
        if model is None:
            return None
        return pair[0], pair[1], Trial(pair[0].cause, Variant(model))

    def _join(
        self, pair: Sequence[Trial], models: Sequence[AttentionModel]
    ) -> AttentionModel | None:
        """Return the model with two changes; ``models`` are those of families."""
        each = iter(models)
        parts = [t.variant.model if t.family is None else next(each) for t in pair]
        return merge_models(self.evidence.model, *parts)


class _ConflictError(Exception):
    """Two changes of one value."""


def merge_models(
    base: AttentionModel, first: AttentionModel, second: AttentionModel
) -> AttentionModel | None:
    """Return the model with the changes of two others; None where both change one value."""
    try:
        settings = _merge_values(base.settings, first.settings, second.settings)
        names = base.weights.keys() | first.weights.keys() | second.weights.keys()
        sides = [[model.weights.get(n) for model in (base, first, second)] for n in names]
        merged = dict(zip(names, (_merge_tensors(*side) for side in sides), strict=True))
    except _ConflictError:
        return None
    weights = {name: x for name, x in merged.items() if x is not None}
    model = replace(first, settings=settings, weights=weights)
    for stage, function in second.replaced.items():
        if function is not base.replaced.get(stage):
            model = model.with_stage_function(stage, function)
    return model


def _merge_values(base: Any, first: Any, second: Any) -> Any:
    if first in (base, second):
        return second
    if second == base:
        return first
    values = base, first, second
    if len({type(each) for each in values}) > 1 or not is_dataclass(base):
        raise _ConflictError
    parts = {f.name: [getattr(each, f.name) for each in values] for f in fields(base)}
    made: Any = type(base)
    return made(**{name: _merge_values(*each) for name, each in parts.items()})


def _merge_tensors(
    base: Tensor | None, first: Tensor | None, second: Tensor | None
) -> Tensor | None:
    if first is base or first is second:
        return second
    if second is base:
        return first
    raise _ConflictError


def _as_pair(first: NamedCause, second: NamedCause) -> list[NamedCause]:
    return [
        replace(first, partner=second.cause.name),
        replace(second, partner=first.cause.name),
    ]
