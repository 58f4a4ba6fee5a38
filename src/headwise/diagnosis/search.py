"""Search for the causes that explain where a layer and a model part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from headwise.diagnosis.causes.cause import Cause, Evidence, Variant
from headwise.diagnosis.causes.fit import fit_variant
from headwise.diagnosis.simulation.gaps import (
    WHOLE,
    Cell,
    Gaps,
    all_heads_agree_within_rounding,
    measure_gaps,
    replace_model_stage_in_heads,
)
from headwise.diagnosis.simulation.model import AttentionModel
from headwise.function.stages import STAGES

MOST_CAUSES = 4
BEAM = 5
# A variant that holds for some heads, stages or calls alone must explain more than a whole one.
RESTRICTION = 0.5
PARAMETER = 0.1


@dataclass(frozen=True)
class NamedCause:
    """A cause that explains some parted cells.

    Attributes:
        cause: the cause.
        variant: how it changed the model.
        model: the model with the fault in the cells that it explains.
        cells: the cells that it explains, to rounding.
        is_partial: True if cells of the same stages did not part, and keep their usual function.
        left: number of cells that part after it, in the stages where it shows.
        equals: other causes that explain the same cells.
        size: the sum of the sizes of these cells, each at most 1.
        partner: the cause without which it explains nothing; "" for none.
    """

    cause: Cause
    variant: Variant
    model: AttentionModel
    cells: tuple[Cell, ...]
    is_partial: bool = False
    left: int = 0
    equals: tuple[str, ...] = ()
    size: float = 0.0
    partner: str = ""

    @property
    def stages(self) -> list[str]:
        """The stages that it explains."""
        return list(dict.fromkeys(stage for stage, _, _ in self.cells))

    @property
    def heads(self) -> list[int] | None:
        """The heads that it explains in its first stage; None for all."""
        first = self.cells[0][0]
        heads = sorted({head for stage, _, head in self.cells if stage == first})
        role = "k" if first[0] in "kv" else "q"
        has_others = len(heads) < len(self.model.weights[f"w{role}"])
        return heads if self.is_partial and WHOLE not in heads and has_others else None

    @property
    def sort_key(self) -> tuple[bool, float, float, int]:
        """Sort key: exact causes first, then more stages, simpler causes, and fewer gaps left."""
        cost = self.cause.cost + PARAMETER * len(self.variant.parameters)
        cost += RESTRICTION * self.is_partial
        return (self.cause.is_statistical, -len(self.stages), cost, self.left)


@dataclass(frozen=True)
class CauseSearchResult:
    """Causes that were named, and what they leave unexplained."""

    causes: tuple[NamedCause, ...]
    left: Gaps


def search_causes(evidence: Evidence, causes: Sequence[Cause]) -> CauseSearchResult:
    """Name the causes why recorded calls part from a model.

    One cause after the other is put into the model, that which explains most stages first. Where
    no cause makes a stage exact, pairs are tried.
    """
    named: list[NamedCause] = []
    while evidence.gaps.cells_beyond_rounding and len(named) < MOST_CAUSES:
        chosen = (
            _find_best_single_cause(evidence, causes)
            or _find_additional_cause(named, evidence, causes)
            or _find_best_pair(evidence, causes)
        )
        if not chosen:
            break
        named += [
            replace(each, size=evidence.gaps.total_clipped_size(each.cells)) for each in chosen
        ]
        evidence = Evidence.of(chosen[-1].model, evidence.calls)
    return CauseSearchResult(tuple(named), evidence.gaps)


def _find_best_single_cause(evidence: Evidence, causes: Sequence[Cause]) -> list[NamedCause]:
    exact = sorted(
        (each for cause in causes for each in _yield_explaining_variants(cause, evidence)),
        key=lambda each: each.sort_key,
    )
    if not exact:
        return []
    best = exact[0]
    others = dict.fromkeys(
        each.cause.name
        for each in exact
        if {*each.cells} == {*best.cells} and each.cause.is_statistical == best.cause.is_statistical
    )
    others.pop(best.cause.name)
    return [replace(best, equals=tuple(others))]


def _find_additional_cause(
    named: Sequence[NamedCause], evidence: Evidence, causes: Sequence[Cause]
) -> list[NamedCause]:
    """Return a cause that explains more beside the last one, where that is in all its stages.

    A cause that does not explain one of its stages may have been there nevertheless, with another
    fault.
    """
    if not named or not named[-1].is_partial:
        return []
    return _find_best_single_cause(Evidence.of(named[-1].variant.model, evidence.calls), causes)


def _yield_explaining_variants(cause: Cause, evidence: Evidence) -> Iterator[NamedCause]:
    """Return the variants of a cause that explain whole stages."""
    for variant in _yield_fitted_variants(cause, evidence):
        if explained := _explain_cells_by_variant(cause, variant, evidence):
            yield explained


def _yield_fitted_variants(cause: Cause, evidence: Evidence) -> Iterator[Variant]:
    cells = evidence.parted_calls_and_heads(*list_recorded_stages_of_cause(cause, evidence))
    if not cells:
        return
    for variant in cause.variants(evidence):
        if isinstance(variant, Variant):
            yield variant
        elif (nearest := fit_variant(variant, evidence, cells)) is not None:
            yield nearest


def list_recorded_stages_of_cause(cause: Cause, evidence: Evidence) -> list[str]:
    """Return the recorded stages in which a cause shows: its own, or else the next after it."""
    recorded = [stage for stage in STAGES if any(stage in call.stages for call in evidence.calls)]
    shown = []
    for stage in cause.stages:
        later = [each for each in recorded if STAGES.index(each) >= STAGES.index(stage)]
        shown += [stage] if stage in recorded else later[:1]
    return list(dict.fromkeys(shown))


def _explain_cells_by_variant(
    cause: Cause, variant: Variant, evidence: Evidence
) -> NamedCause | None:
    """Return what a variant explains: all parted cells of at least one stage.

    A variant that must be kept from some heads explains nothing if it breaks the heads that it
    explains in another call.
    """
    stages = list_recorded_stages_of_cause(cause, evidence)
    if not any(_explains_smallest_call(variant, evidence, stage) for stage in stages):
        return None
    after = measure_gaps(variant.model, evidence.calls, stages)
    cells: list[Cell] = []
    for stage in stages:
        parted = evidence.parted_calls_and_heads(stage)
        if all(_is_cell_explained(cell, evidence.gaps, after) for cell in parted):
            cells += parted
        elif cause.is_whole:
            return None
    if not cells:
        return None
    model, is_partial = _apply_variant_in_cells(variant, evidence, after, cells)
    if is_partial and {*measure_gaps(model, evidence.calls, stages).cells_beyond_rounding} - {
        *evidence.gaps.cells_beyond_rounding
    }:
        return None
    return NamedCause(
        cause, variant, model, tuple(cells), is_partial, len(after.cells_beyond_rounding)
    )


def _explains_smallest_call(variant: Variant, evidence: Evidence, stage: str) -> bool:
    """True if the smallest call in which a stage parts is explained: most variants fail there."""
    parted = evidence.parted_calls_and_heads(stage)
    if not parted:
        return False
    sizes = {n: evidence.calls[n].stages[stage].numel() for _, n, _ in parted}
    number = min(sizes, key=sizes.__getitem__)
    heads = [head for _, n, head in parted if n == number]
    return all_heads_agree_within_rounding(variant.model, evidence.calls[number], stage, heads)


def _is_cell_explained(cell: Cell, before: Gaps, after: Gaps) -> bool:
    stage, number, _ = cell
    if cell in after.cells:
        return before.cells[cell].is_explained(after.cells[cell])
    # The heads of a stage that had another shape.
    gaps = [gap for (s, n, _), gap in after.cells.items() if (s, n) == (stage, number)]
    return bool(gaps) and all(before.cells[cell].is_explained(gap) for gap in gaps)


def _apply_variant_in_cells(
    variant: Variant, evidence: Evidence, after: Gaps, cells: Sequence[Cell]
) -> tuple[AttentionModel, bool]:
    """Return the model with the fault where it explains, and whether that is in part only."""
    explained = {stage for stage, _, _ in cells}
    broken = after.cells_beyond_rounding
    has_other_heads = variant.model.weights["wq"].shape != evidence.model.weights["wq"].shape
    if not broken or has_other_heads:  # other heads are never those of some stages alone
        return variant.model, False
    model = evidence.model
    for stage in explained:
        heads = sorted({head for s, _, head in cells if s == stage})
        some = any(cell[0] == stage for cell in broken)
        model = replace_model_stage_in_heads(model, variant.model, stage, heads if some else None)
    return model, True


def _explains_gaps_of_stage(model: AttentionModel, evidence: Evidence, stage: str) -> bool:
    after = measure_gaps(model, evidence.calls, [stage])
    parted = evidence.parted_calls_and_heads(stage)
    return all(_is_cell_explained(cell, evidence.gaps, after) for cell in parted)


def _find_best_pair(evidence: Evidence, causes: Sequence[Cause]) -> list[NamedCause]:
    """Return two causes that explain a stage together, or nothing.

    One cause twice is no pair: that undoes what the first did, and is another name for anything.
    """
    stage = evidence.gaps.stages_beyond_rounding[0]
    concerned = [
        cause for cause in causes if stage in list_recorded_stages_of_cause(cause, evidence)
    ]
    before = evidence.gaps.totals_of_stage(stage)
    nearest: list[tuple[tuple[float, float], int, Cause, Variant]] = []
    for cause in concerned:
        for variant in _yield_fitted_variants(cause, evidence):
            size = measure_gaps(variant.model, evidence.calls, [stage]).totals_of_stage(stage)
            if variant.is_step or size < before:
                size = (0.0, 0.0) if variant.is_step else size
                nearest.append((size, len(nearest), cause, variant))
    pairs: list[tuple[tuple[bool, float, float, int], int, list[NamedCause]]] = []
    for _, _, cause, variant in sorted(nearest)[:BEAM]:
        first = NamedCause(
            cause, variant, variant.model, tuple(evidence.parted_calls_and_heads(stage))
        )
        others = [each for each in concerned if each is not cause]
        for second in _find_best_single_cause(Evidence.of(variant.model, evidence.calls), others):
            if _explains_gaps_of_stage(second.model, evidence, stage):
                both = [
                    replace(first, partner=second.cause.name),
                    replace(second, partner=cause.name),
                ]
                pairs.append((second.sort_key, len(pairs), both))
    return min(pairs)[2] if pairs else []
