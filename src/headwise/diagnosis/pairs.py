"""Pairs of causes that explain a stage only together.

First comes what one cause explains where the other cannot show: in the smallest call there may be
no mask, and no key beyond a window. Where both show in it, changes of the model are joined two by
two, and tried on this call alone. The nearest causes are last, each followed by a search of its
own, for causes that are read off the data.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations, product

from torch import Tensor

from headwise.diagnosis import watch
from headwise.diagnosis.causes.evidence import Evidence, Variant
from headwise.diagnosis.causes.heads import merge_models
from headwise.diagnosis.fit import compute_residuals, fit_numbers, heads_by_stage
from headwise.diagnosis.simulation import gaps
from headwise.diagnosis.simulation.gaps import Cell, measure_gaps
from headwise.diagnosis.simulation.model import AttentionModel, RecordedCall
from headwise.diagnosis.trials import (
    NamedCause,
    Trial,
    Trials,
    find_best_single_cause,
    is_cell_explained,
    recorded_stages_of,
)
from headwise.identify import catalogue
from headwise.identify.catalogue import Cause

MOST_FIRSTS = 6  # that explain the smallest call
MOST_OF_A_FIRST = 2
MOST_OF_A_CAUSE = 6
ALONE = {catalogue.BATCH_SEQUENCE_EXCHANGED, catalogue.NUMBER_OF_HEADS}  # change all shapes
MOST_ALIKE = 4  # variants that look the same in the smallest call
MOST_FITTING = 40  # pairs that explain the smallest call, and are tried on others
MOST_RUNS = 12000  # of the smallest call, where changes are joined two by two
RUNS = {0: 1, 1: 20, 2: 60}  # about so many for a pair with no, one or two numbers to fit
THIN = 3  # one of so many starts is tried where two numbers are fitted
ALIKE = 1e-3  # of what two families change, where they differ by less they look the same
NEAREST = 4
DIGITS = 4  # of predicted stages that look the same


def find_best_pair(
    evidence: Evidence, causes: Sequence[Cause], firsts: Sequence[Trial]
) -> list[NamedCause]:
    """Return two causes that explain a stage together, the first such stage; nothing for none.

    ``firsts`` explain the smallest call of a stage alone. One cause twice is no pair: that undoes
    what the first did, and is another name for anything. A statistical cause is in none: it would
    explain whatever a cause that replaces weights leaves.
    """
    for stage in evidence.gaps.stages_beyond_rounding:
        if pair := _find_pair_of_stage(evidence, stage, causes, firsts):
            return pair
    return []


def _find_pair_of_stage(
    evidence: Evidence, stage: str, causes: Sequence[Cause], firsts: Sequence[Trial]
) -> list[NamedCause]:
    concerned = [
        cause
        for cause in causes
        if not cause.is_statistical and stage in recorded_stages_of(cause, evidence)
    ]
    pairs = _Pairs(evidence, stage, concerned)
    ordered = pairs.order_firsts(
        [
            trial
            for trial in firsts
            if trial.cause in concerned and pairs.trials.explains_smallest_call(trial, stage)
        ]
    )
    return pairs.after(ordered) or pairs.joined() or pairs.after(pairs.nearest(), in_parts=False)


@dataclass(eq=False)
class _Pairs:
    evidence: Evidence
    stage: str
    causes: Sequence[Cause]
    tried: set[object] = field(default_factory=set)  # firsts, each of which takes a search

    @cached_property
    def trials(self) -> Trials:
        return Trials(self.evidence, self.causes)

    @cached_property
    def every(self) -> list[Trial]:
        limited = Trials(replace(self.evidence, fitted={}, is_limited=True), self.causes)
        sides = product((self.trials, limited), self.causes)
        return [trial for trials, cause in sides for trial in trials.of_cause(cause)]

    @cached_property
    def parted(self) -> tuple[Cell, ...]:
        return tuple(self.evidence.parted_calls_and_heads(self.stage))

    @cached_property
    def by_size(self) -> list[int]:
        numbers = {number for _, number, _ in self.parted}
        return sorted(numbers, key=lambda n: self.evidence.calls[n].inputs.x.numel())

    def order_firsts(self, firsts: Sequence[Trial]) -> list[Trial]:
        left = {id(trial): self._left_in_calls(trial) for trial in firsts}
        ordered = sorted(firsts, key=lambda trial: (left[id(trial)], trial.cost))
        counts = Counter[Cause]()
        chosen = []
        for trial in ordered:
            counts[trial.cause] += 1
            chosen += [trial] if counts[trial.cause] <= MOST_OF_A_FIRST else []
        return chosen[:MOST_FIRSTS]

    def _left_in_calls(self, trial: Trial) -> tuple[float, float]:
        """Return the shares of entries that a variant leaves in the calls that part, and sizes."""
        shares, sizes = [], []
        for number in self.by_size:
            call = self.evidence.calls[number]
            share, size = self._left(trial, call, self._bounds[number])
            whole = float(call.stages[self.stage].nan_to_num(0, 0, 0).norm())
            shares.append(min(share, 1.0))
            sizes.append(size / (whole or 1.0))  # all may be 0, or NaN
        return round(sum(shares), DIGITS), sum(sizes)

    def _left(self, trial: Trial, call: RecordedCall, bound: Tensor) -> tuple[float, float]:
        """Return the share of entries that a variant leaves in a call, and the norm."""
        apart = self._difference(trial.variant.model, call)
        if apart is None:
            return math.inf, math.inf
        share = float((apart > bound).double().mean())
        return share, float(apart.masked_fill(apart.isinf(), 0.0).norm())

    @cached_property
    def _bounds(self) -> dict[int, Tensor]:
        model, calls = self.evidence.model, self.evidence.calls
        return {
            n: gaps.allowed_difference(model.prepare_stage(self.stage, calls[n])).amax()
            for n in self.by_size
        }

    def _difference(self, model: AttentionModel, call: RecordedCall) -> Tensor | None:
        if self.stage in gaps.list_misshapen_stages(model, call):
            return None
        predicted, actual = model.predict_stage(self.stage, call), call.stages[self.stage]
        if predicted.shape != actual.shape:
            return None
        return gaps.absolute_difference(predicted, actual)

    def after(self, firsts: Iterable[Trial], *, in_parts: bool = True) -> list[NamedCause]:
        pairs = list[list[NamedCause]]()
        for trial in firsts:
            key = trial.cause, str(trial.variant.parameters), trial.variant.heads
            if key in self.tried:
                continue
            self.tried.add(key)
            watch.look(f"trying pairs with {trial.cause.name}")
            if trial.family is None:
                in_some = in_parts or trial.variant.is_step  # which a part of the scores shows
                pair = self._second_of(trial, in_parts=in_some)
            else:
                pair = self._second_nearest(trial)
            pairs += [pair] if pair else []
        return min(pairs, key=lambda pair: pair[1].sort_key, default=[])

    def _second_of(self, first: Trial, *, in_parts: bool) -> list[NamedCause]:
        others = [each for each in self.causes if each is not first.cause]
        left = Evidence.of(first.variant.model, self.evidence.calls)
        limited = [replace(left, fitted={}, is_limited=True)] if in_parts else []
        for evidence in (left, *limited):
            for second in find_best_single_cause(evidence, others)[0]:
                if self._explains(second.model):
                    model = first.variant.model
                    alone = NamedCause(first.cause, first.variant, model, self.parted)
                    return _as_pair(alone, second)
        return []

    def _second_nearest(self, first: Trial) -> list[NamedCause]:
        """Return a pair with one of the nearest causes where the first explains nothing.

        The number of the first is fitted again with it: small calls tell few of its digits.
        """
        evidence = self.evidence
        first, number = self._grown(first)
        cells = [cell for cell in self.parted if cell[1] == number]
        ranked = []
        for place, second in enumerate(self.every):
            if second.cause in ALONE:
                continue
            model = merge_models(evidence.model, first.variant.model, second.variant.model)
            if second.cause is not first.cause and model is not None:
                size = compute_residuals(model, evidence.calls, heads_by_stage(cells)).norm()
                ranked.append((float(size), place, second))
        for _, _, second in sorted(ranked)[:NEAREST]:
            if (pair := self._fitted_to_all([first, second])) is not None:
                return self._name(*pair)
        return []

    def _grown(self, trial: Trial) -> tuple[Trial, int]:
        """Return a trial fitted to larger and larger calls, and the first that it leaves."""
        for number in self.by_size:
            cells = [cell for cell in self.parted if cell[1] == number]
            nearer = trial.fitted_to(self.evidence.calls, cells, only=True)
            if not self._explains_call(nearer, number):
                return trial, number
            trial = nearer
        return trial, number

    def _explains_call(self, trial: Trial, number: int) -> bool:
        heads = [head for _, n, head in self.parted if n == number]
        call = self.evidence.calls[number]
        return gaps.all_heads_agree_within_rounding(trial.variant.model, call, self.stage, heads)

    def _explains(self, model: AttentionModel) -> bool:
        evidence = self.evidence
        after = measure_gaps(model, evidence.calls, [self.stage])
        return not {*after.cells_beyond_rounding} - {*self.parted} and all(
            is_cell_explained(cell, evidence.gaps, after) for cell in self.parted
        )

    def nearest(self) -> list[Trial]:
        """Return the variants that leave least of the smallest call, and those that are steps.

        What is added to the output is a step too: it hides how near other causes are.
        """
        steps = [trial for trial in self.every if _is_step(trial)]
        others = (trial for trial in self.every if not _is_step(trial))
        return [*steps, *sorted(others, key=self._left_in_smallest_call)][:NEAREST]

    def joined(self) -> list[NamedCause]:
        fitting = 0
        for number, groups in enumerate(pairs := self._list_pairs()):
            names = " and ".join(group[0].cause.name for group in groups)
            watch.look(f"trying {names}", number, len(pairs))
            small = self.trials.smallest[self.stage].cells
            fitted = self._fitted([group[0] for group in groups], small)
            if fitted is None or not self.trials.explains_smallest_call(fitted[2], self.stage):
                continue
            for alike in product(*(group[:MOST_ALIKE] for group in groups)):
                numbers = [t.number for t in fitted[:2] if t.family is not None]
                pair = [t if t.family is None else t.with_number(numbers.pop(0)) for t in alike]
                if (whole := self._fitted_to_all(pair)) is not None:
                    return self._name(*whole)
            fitting += 1
            if fitting == MOST_FITTING:
                break
        return []

    def _list_pairs(self) -> list[tuple[list[Trial], list[Trial]]]:
        """Return the pairs to try, those of near variants first, as many as their work allows."""
        places = Counter[Cause]()
        ranked = []
        for group in self._groups:
            ranked.append((places[group[0].cause], group))
            places[group[0].cause] += 1
        pairs = [
            (place + other, a[0].cost + b[0].cost, number, (a, b))
            for number, ((place, a), (other, b)) in enumerate(combinations(ranked, 2))
            if a[0].cause is not b[0].cause
        ]
        chosen, runs = list[tuple[list[Trial], list[Trial]]](), 0
        for *_, pair in sorted(pairs, key=lambda each: each[:3]):
            runs += RUNS[sum(group[0].family is not None for group in pair)]
            if runs > MOST_RUNS:
                break
            chosen.append(pair)
        return chosen

    def _fitted_to_all(self, pair: Sequence[Trial]) -> tuple[Trial, Trial, Trial] | None:
        """Return what `_fitted` does for all calls, of a pair that explains each; None for others.

        The numbers are those of the call before, so that the smallest calls refute most pairs.
        """
        fitted, families = None, [n for n, trial in enumerate(pair) if trial.family is not None]
        for number in self.by_size:
            cells = [cell for cell in self.parted if cell[1] == number]
            fitted = self._fitted(pair, cells, [[pair[n].number for n in families]])
            if fitted is None or not self._explains_call(fitted[2], number):
                return None
            pair = fitted[:2]
        fitted = self._fitted(pair, self.parted, [[pair[n].number for n in families]])
        return fitted if fitted and self._explains(fitted[2].variant.model) else None

    def _name(self, first: Trial, second: Trial, both: Trial) -> list[NamedCause]:
        """Return both causes, or one where a fitted number of the other changes nothing."""
        for each in (first, second):
            if self._explains(each.variant.model):
                return [NamedCause(each.cause, each.variant, each.variant.model, self.parted)]
        alone = NamedCause(first.cause, first.variant, first.variant.model, self.parted)
        model = both.variant.model
        return _as_pair(alone, NamedCause(second.cause, second.variant, model, self.parted))

    @cached_property
    def _groups(self) -> list[list[Trial]]:
        """Variants that change the smallest call; those that look the same there are together.

        Of each cause the nearest ones are taken, without those that change shapes or what agrees.
        """
        small, base = self.trials.smallest[self.stage], self.evidence.model
        if self._difference(base, small.call) is None:
            return []
        usual = base.predict_stage(self.stage, small.call)
        unit = 10.0**-DIGITS * usual.abs().nan_to_num(0.0, posinf=0.0).amax()
        groups: dict[object, list[Trial]] = {}
        families = list[tuple[Tensor, list[Trial]]]()
        for trial in self.every:
            model = trial.variant.model
            is_misshapen = self.stage in gaps.list_misshapen_stages(model, small.call)
            if trial.cause in ALONE or is_misshapen:
                continue
            predicted = model.predict_stage(self.stage, small.call)
            if predicted.shape != usual.shape:
                continue
            if trial.family is not None:
                if any(self._may_be_part(trial.family.make(n).model) for n in trial.family.starts):
                    _add_family(families, trial, predicted - usual)
            elif self._may_be_part(model):
                key = trial.cause, (predicted / unit).round().numpy().tobytes()
                groups.setdefault(key, []).append(trial)
        ranked: dict[Cause, list[tuple[tuple[float, float], int, list[Trial]]]] = {}
        every = (*groups.values(), *(group for _, group in families))
        for number, group in enumerate(every):
            each = ranked.setdefault(group[0].cause, [])
            each.append((self._left_in_smallest_call(group[0]), number, group))
        return [group for each in ranked.values() for *_, group in sorted(each)[:MOST_OF_A_CAUSE]]

    def _may_be_part(self, model: AttentionModel) -> bool:
        """True if a change shows in the smallest call, and breaks nothing of what agrees.

        That are rows of this call, and calls of no more tokens.
        """
        small, base = self.trials.smallest[self.stage], self.evidence.model
        usual = base.predict_stage(self.stage, small.call)
        predicted = model.predict_stage(self.stage, small.call)
        change = gaps.absolute_difference(predicted, usual)
        if not bool((change > small.bound).any()):
            return False
        far = small.far if bool(small.far.isfinite()) else gaps.FAR * small.bound
        rows = change.flatten(0, -2)[self._agreeing_rows]
        if bool((rows > far).any()):
            return False
        for call in self._agreeing_calls:
            apart = self._difference(model, call)
            if apart is None or bool((apart > far).any()):
                return False
        return True

    @cached_property
    def _agreeing_rows(self) -> Tensor:
        small = self.trials.smallest[self.stage]
        apart = self._difference(self.evidence.model, small.call)
        assert apart is not None
        return (apart <= small.bound).flatten(0, -2).all(-1)

    @cached_property
    def _agreeing_calls(self) -> list[RecordedCall]:
        """The calls that agree and have no more tokens than the smallest one that parts."""
        small = self.trials.smallest[self.stage]
        parted = {number for _, number, _ in self.parted}
        return [
            call
            for number, call in enumerate(self.evidence.calls)
            if number not in parted
            and self.stage in call.stages
            and call.inputs.x.numel() <= small.call.inputs.x.numel()
        ]

    def _left_in_smallest_call(self, trial: Trial) -> tuple[float, float]:
        small = self.trials.smallest[self.stage]
        return self._left(trial, small.call, small.bound)

    def _fitted(
        self, pair: Sequence[Trial], cells: Sequence[Cell], starts: Sequence[Sequence[float]] = ()
    ) -> tuple[Trial, Trial, Trial] | None:
        families = [trial.family for trial in pair if trial.family is not None]
        if len(families) > 1 and not starts:
            grid = [(t.number, *t.family.starts[::THIN]) for t in pair if t.family is not None]
            starts = [*product(*grid)]
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
        each = iter(models)
        parts = [t.variant.model if t.family is None else next(each) for t in pair]
        return merge_models(self.evidence.model, *parts)


def _is_step(trial: Trial) -> bool:
    return trial.variant.is_step or trial.cause is catalogue.RESIDUAL_INSIDE


def _add_family(families: list[tuple[Tensor, list[Trial]]], trial: Trial, change: Tensor) -> None:
    for other, group in families:
        if float((change - other).norm()) < ALIKE * float(other.norm()):
            group.append(trial)
            return
    families.append((change, [trial]))


def _as_pair(first: NamedCause, second: NamedCause) -> list[NamedCause]:
    return [replace(first, partner=second.name), replace(second, partner=first.name)]
