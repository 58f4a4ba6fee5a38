"""Trials of causes: whether a variant of the model explains recorded calls, the smallest first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from headwise.diagnosis import watch
from headwise.diagnosis.causes import (
    axes,
    decoding,
    differential,
    dtypes,
    flattening,
    heads,
    latent,
    masks,
    merges,
    norms,
    rotary,
    scores,
    weights,
)
from headwise.diagnosis.causes.evidence import Evidence, Family, Search, Variant
from headwise.diagnosis.causes.heads import limit, within
from headwise.diagnosis.fit import fit_numbers
from headwise.diagnosis.simulation import gaps
from headwise.diagnosis.simulation.gaps import WHOLE, Cell, Gaps, measure_gaps
from headwise.diagnosis.simulation.model import AttentionModel, RecordedCall
from headwise.identify import catalogue
from headwise.identify.catalogue import REPORTED, Cause

MODULES = (
    weights,
    axes,
    flattening,
    heads,
    merges,
    norms,
    latent,
    rotary,
    scores,
    differential,
    dtypes,
    masks,
    decoding,
)
ALONG_KEYS = (
    masks.__name__,
    dtypes.__name__,
    flattening.__name__,
)  # whose scores have the keys of the call
# The function that looks for a cause has the name of its row.
SEARCHES: Mapping[Cause, Search] = {
    cause: vars(module)[f"_{name.lower()}"]
    for name, cause in vars(catalogue).items()
    for module in MODULES
    if f"_{name.lower()}" in vars(module)
}
# A variant that holds for some heads, stages or calls alone must explain more than a whole one.
RESTRICTION = 0.5
PARAMETER = 0.1


@dataclass(frozen=True)
class NamedCause:
    """A cause that explains some parted cells."""

    cause: Cause
    variant: Variant  # how it changed the model
    model: AttentionModel  # with the fault in the cells that it explains
    cells: tuple[Cell, ...]  # that it explains, to rounding
    is_partial: bool = False  # cells of the same stages did not part, and keep their function
    left: int = 0  # number of cells that part after it, in the stages where it shows
    equals: tuple[str, ...] = ()  # other causes that explain the same cells, by their rank
    size: float = 0.0  # the sum of the sizes of these cells, each at most 1
    partner: str = ""  # the cause without which it explains nothing; "" for none

    @property
    def name(self) -> str:
        """The name of the cause, in the direction of the fault."""
        return self.cause.unexpected if self.variant.is_unexpected else self.cause.name

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages that it explains."""
        return tuple(dict.fromkeys(stage for stage, _, _ in self.cells))

    @property
    def heads(self) -> tuple[int, ...] | None:
        """The heads that it explains in its first stage; None for all."""
        if self.variant.heads is not None:
            return self.variant.heads
        first = self.cells[0][0]
        heads = tuple(sorted({head for stage, _, head in self.cells if stage == first}))
        role = "k" if first[0] in "kv" else "q"
        has_others = len(heads) < len(self.model.weights[f"w{role}"])
        return heads if self.is_partial and WHOLE not in heads and has_others else None

    @property
    def sort_key(self) -> tuple[bool, float, int, float, int]:
        """Sort key: exact causes first, then more stages, simpler causes, and fewer gaps left.

        Numbers of configs come before simpler causes, and numbers that nobody uses after them.
        """
        cost = self.cause.cost + PARAMETER * len(self.variant.parameters)
        cost += RESTRICTION * self.is_partial
        rank = REPORTED if self.variant.rank is None else self.variant.rank
        return (self.cause.is_statistical, -len(self.stages), rank, cost, self.left)


@dataclass(frozen=True)
class Trial:
    """A variant of a cause; that of a family is fitted to the smallest calls alone."""

    cause: Cause
    variant: Variant
    family: Family | None = None
    number: float = math.nan  # of the family

    def fitted_to(
        self, calls: Sequence[RecordedCall], cells: Sequence[Cell], *, only: bool = False
    ) -> Trial:
        """Return the trial with the number nearest to these cells; ``only`` starts from its own."""
        if self.family is None:
            return self
        starts = [[start] for start in (self.number, *(() if only else self.family.starts))]
        numbers = fit_numbers([self.family], calls, cells, starts=starts)
        return self if numbers is None else self.with_number(*numbers)

    def with_number(self, number: float) -> Trial:
        """Return the trial with another number of its family."""
        assert self.family is not None
        return replace(self, variant=self.family.make(number), number=number)

    @property
    def cost(self) -> float:
        """Rank among trials that explain the same; a lower one is named first."""
        return self.cause.cost + PARAMETER * len(self.variant.parameters)


@dataclass(frozen=True)
class SmallestCall:
    """The smallest call in which a stage parts: most variants fail there."""

    number: int
    call: RecordedCall
    cells: tuple[Cell, ...]
    bound: Tensor  # what rounding explains of the model's stage
    far: Tensor  # a difference that rounding cannot explain, whatever the variant is

    @property
    def heads(self) -> list[int]:
        """The heads that part."""
        return [head for _, _, head in self.cells]


class Trials:
    """Variants of causes that are tried on the same evidence."""

    def __init__(self, evidence: Evidence, causes: Sequence[Cause]) -> None:
        self.evidence, self.causes = evidence, causes

    @cached_property
    def smallest(self) -> dict[str, SmallestCall]:
        """The smallest call in which each stage parts."""
        evidence, calls = self.evidence, {}
        for stage in evidence.gaps.stages_beyond_rounding:
            parted = evidence.parted_calls_and_heads(stage)
            sizes = {n: evidence.calls[n].stages[stage].numel() for _, n, _ in parted}
            number = min(sizes, key=sizes.__getitem__)
            call = evidence.calls[number]
            forced = evidence.model.prepare_stage(stage, call)
            cells = tuple(cell for cell in parted if cell[1] == number)
            bound = gaps.allowed_difference(forced).amax()
            far = gaps.hopeless_difference(forced)
            calls[stage] = SmallestCall(number, call, cells, bound, far)
        return calls

    def of_cause(self, cause: Cause) -> Iterator[Trial]:
        """Yield the variants of a cause that shows in a stage that parts."""
        evidence = self.evidence
        stages = self.stages_of(cause)
        cells = [cell for stage in stages for cell in self.smallest[stage].cells]
        if not cells:
            return
        search = SEARCHES.get(cause)
        is_along_keys = search is not None and search.__module__ in ALONG_KEYS
        if evidence.attends_across_batch and is_along_keys:
            return
        variants = evidence.search_moves(cause) if search is None else search(evidence)
        variants = limit(cause, variants, evidence) if evidence.is_limited else variants
        for place, variant in enumerate(variants):
            if isinstance(variant, Variant):
                yield Trial(cause, variant)
                continue
            if (cause, place) not in evidence.fitted:  # a fit is asked for alone and in pairs
                numbers = fit_numbers([variant], evidence.calls, cells)
                evidence.fitted[cause, place] = numbers
            if (numbers := evidence.fitted[cause, place]) is not None:
                yield Trial(cause, variant.make(numbers[0]), variant, numbers[0])

    def stages_of(self, cause: Cause) -> list[str]:
        """Return the stages that part in which a cause shows."""
        return [s for s in recorded_stages_of(cause, self.evidence) if s in self.smallest]

    def explained_stages(self, trial: Trial) -> list[str]:
        """Return the stages of the cause whose smallest call is explained."""
        return [s for s in self.stages_of(trial.cause) if self.explains_smallest_call(trial, s)]

    def explains_smallest_call(self, trial: Trial, stage: str) -> bool:
        """True if the smallest call in which a stage parts is explained."""
        small = self.smallest[stage]
        return gaps.all_heads_agree_within_rounding(
            trial.variant.model, small.call, stage, small.heads, far=small.far
        )

    def named(self, trial: Trial) -> NamedCause | None:
        """Return what a trial explains: all parted cells of at least one stage.

        A variant that must be kept from some heads explains nothing if it breaks the heads that it
        explains in another call.
        """
        evidence, cause = self.evidence, trial.cause
        stages = recorded_stages_of(cause, evidence)
        trial = trial.fitted_to(evidence.calls, evidence.parted_calls_and_heads(*stages))
        variant = trial.variant
        after = measure_gaps(variant.model, evidence.calls, stages)
        cells: list[Cell] = []
        for stage in stages:
            parted = evidence.parted_calls_and_heads(stage)
            if all(is_cell_explained(cell, evidence.gaps, after) for cell in parted):
                cells += parted
            elif cause.is_whole:
                return None
        if not cells:
            return None
        if (plain := self._with_plain_number(trial, cells)) is not None:
            variant, after = plain
        model, is_partial = _apply_variant_in_cells(variant, evidence, after, cells)
        if is_partial and {*measure_gaps(model, evidence.calls, stages).cells_beyond_rounding} - {
            *evidence.gaps.cells_beyond_rounding
        }:
            return None
        left = len(after.cells_beyond_rounding)
        return NamedCause(cause, variant, model, tuple(cells), is_partial, left)

    def _with_plain_number(
        self, trial: Trial, cells: Sequence[Cell]
    ) -> tuple[Variant, Gaps] | None:
        evidence, stages = self.evidence, recorded_stages_of(trial.cause, self.evidence)
        for number in () if trial.family is None else trial.family.list_plain(trial.number):
            plain = trial.with_number(number)
            if all(self.explains_smallest_call(plain, s) for s in {stage for stage, *_ in cells}):
                after = measure_gaps(plain.variant.model, evidence.calls, stages)
                if all(is_cell_explained(cell, evidence.gaps, after) for cell in cells):
                    return plain.variant, after
        return None


def find_best_single_cause(
    evidence: Evidence, causes: Sequence[Cause]
) -> tuple[list[NamedCause], list[Trial]]:
    """Return the cause that explains most, or else trials that explain a stage's smallest call."""
    trials, exact, firsts = Trials(evidence, causes), list[NamedCause](), list[Trial]()
    try:
        for number, cause in enumerate(causes):
            watch.look(f"trying {cause.name}", number, len(causes))
            for trial in trials.of_cause(cause):
                watch.look()
                explained = trials.explained_stages(trial)
                named = trials.named(trial) if explained else None
                if named is not None:
                    exact.append(named)
                elif explained:
                    firsts.append(trial)
    except watch.STOPS as error:
        if not exact:
            raise
        watch.current().stop(error, f"{len(causes) - number} of {len(causes)} causes")
    if not exact:
        return [], firsts
    best, *others = sorted(exact, key=lambda each: each.sort_key)
    equals = dict.fromkeys(
        each.name
        for each in sorted(others, key=lambda x: x.variant.rank or x.cause.rank)
        if {*each.cells} == {*best.cells} and each.cause.is_statistical == best.cause.is_statistical
    )
    equals.pop(best.name, None)
    return [replace(best, equals=tuple(equals))], []


def recorded_stages_of(cause: Cause, evidence: Evidence) -> list[str]:
    """Return the recorded stages in which a cause shows: its own, or else the next after it."""
    return list(dict.fromkeys(filter(None, map(evidence.shown_stages.get, cause.stages))))


def is_cell_explained(cell: Cell, before: Gaps, after: Gaps) -> bool:
    """True if rounding explains what is left of a cell that parted."""
    stage, number, _ = cell
    if cell in after.cells:
        return before.cells[cell].is_explained(after.cells[cell])
    # The heads of a stage that had another shape.
    others = [gap for (s, n, _), gap in after.cells.items() if (s, n) == (stage, number)]
    return bool(others) and all(before.cells[cell].is_explained(gap) for gap in others)


def _apply_variant_in_cells(
    variant: Variant, evidence: Evidence, after: Gaps, cells: Sequence[Cell]
) -> tuple[AttentionModel, bool]:
    explained = {stage for stage, _, _ in cells}
    broken = after.cells_beyond_rounding
    sides = (evidence.model, variant.model)
    shapes = [[model.projection(role)[0].shape for role in "qk"] for model in sides]
    has_other_heads = shapes[0] != shapes[1]
    if not broken or has_other_heads:  # other heads are never those of some stages alone
        return variant.model, False
    model = evidence.model
    for stage in explained:
        heads = sorted({head for s, _, head in cells if s == stage})
        some = any(cell[0] == stage for cell in broken)
        model = within(model, variant.model, stage, heads if some else None)
    return model, True
