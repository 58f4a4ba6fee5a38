"""Search for the causes why recorded calls and a model part, and what they explain."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.diagnosis import catalogue
from headwise.diagnosis.catalogue import CAUSES, Cause
from headwise.diagnosis.causes import (
    axes,
    decoding,
    eviction,
    masks,
    norms,
    rotary,
    scores,
    weights,
)
from headwise.diagnosis.causes.evidence import Evidence, Family, Search, Variant
from headwise.diagnosis.causes.parts import limit
from headwise.diagnosis.comparison import FoundCause, FunctionComparison, PartedStage, StageGaps
from headwise.diagnosis.results import Verdict
from headwise.diagnosis.simulation import gaps
from headwise.diagnosis.simulation.gaps import WHOLE, Cell, Gap, Gaps, measure_gaps
from headwise.diagnosis.simulation.model import AttentionModel, ForcedStage, RecordedCall
from headwise.errors import OptionError
from headwise.function.rounding import is_coarser
from headwise.function.stages import STAGES

# The function that looks for a cause has the name of its row.
SEARCHES: Mapping[Cause, Search] = {
    cause: vars(module)[f"_{name.lower()}"]
    for name, cause in vars(catalogue).items()
    for module in (weights, axes, norms, rotary, scores, masks, decoding, eviction)
    if f"_{name.lower()}" in vars(module)
}
MOST_CAUSES = 4
BEAM = 5
# A variant that holds for some heads, stages or calls alone must explain more than a whole one.
RESTRICTION = 0.5
PARAMETER = 0.1

# Of the fit of one number.
BEST_STARTS = 2
ROUNDS = 12
SHARES = (1.0, 0.25)  # of a step that is tried
BEYOND = 0.1  # of the span of the starts, which a fit may leave
STEP = 1e-5  # of the numerical derivative
MOST_ENTRIES = 20_000  # of residuals; more do not make the fit better


@dataclass(frozen=True)
class NamedCause:
    """A cause that explains some parted cells."""

    cause: Cause
    variant: Variant  # how it changed the model
    model: AttentionModel  # with the fault in the cells that it explains
    cells: tuple[Cell, ...]  # that it explains, to rounding
    is_partial: bool = False  # cells of the same stages did not part, and keep their function
    left: int = 0  # number of cells that part after it, in the stages where it shows
    equals: tuple[str, ...] = ()  # other causes that explain the same cells
    size: float = 0.0  # the sum of the sizes of these cells, each at most 1
    partner: str = ""  # the cause without which it explains nothing; "" for none

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
    def sort_key(self) -> tuple[bool, float, float, int]:
        """Sort key: exact causes first, then more stages, simpler causes, and fewer gaps left."""
        cost = self.cause.cost + PARAMETER * len(self.variant.parameters)
        cost += RESTRICTION * self.is_partial
        return (self.cause.is_statistical, -len(self.stages), cost, self.left)


class CauseSearchResult(NamedTuple):
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
        chosen = _find_best_single_cause(evidence, causes)
        # A cause that does not explain one of its stages may have been there nevertheless, with
        # another fault, where the last one is in all its stages.
        if not chosen and named and named[-1].is_partial:
            everywhere = Evidence.of(named[-1].variant.model, evidence.calls)
            chosen = _find_best_single_cause(everywhere, causes)
        limited = replace(evidence, fitted={}, is_limited=True)
        chosen = chosen or _find_best_single_cause(limited, causes)
        chosen = chosen or _find_best_pair(evidence, causes)
        if not chosen:
            break
        named += [
            replace(each, size=evidence.gaps.total_clipped_size(each.cells)) for each in chosen
        ]
        evidence = Evidence.of(chosen[-1].model, evidence.calls)
    return CauseSearchResult(tuple(named), evidence.gaps)


def _find_best_single_cause(evidence: Evidence, causes: Sequence[Cause]) -> list[NamedCause]:
    tried = (
        _explain_cells_by_variant(cause, variant, evidence)
        for cause in causes
        for variant in _yield_fitted_variants(cause, evidence)
    )
    exact = sorted(filter(None, tried), key=lambda each: each.sort_key)
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


def _yield_fitted_variants(cause: Cause, evidence: Evidence) -> Iterator[Variant]:
    cells = evidence.parted_calls_and_heads(*list_recorded_stages_of_cause(cause, evidence))
    if not cells:
        return
    search = SEARCHES.get(cause)
    variants = evidence.search_moves(cause) if search is None else search(evidence)
    variants = limit(cause, variants, evidence) if evidence.is_limited else variants
    for place, variant in enumerate(variants):
        if isinstance(variant, Variant):
            yield variant
            continue
        if (cause, place) not in evidence.fitted:  # a fit is asked for alone and in pairs
            evidence.fitted[cause, place] = fit_variant(variant, evidence, cells)
        if (nearest := evidence.fitted[cause, place]) is not None:
            yield nearest


def list_recorded_stages_of_cause(cause: Cause, evidence: Evidence) -> list[str]:
    """Return the recorded stages in which a cause shows: its own, or else the next after it."""
    return list(dict.fromkeys(filter(None, map(evidence.shown_stages.get, cause.stages))))


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
    return gaps.all_heads_agree_within_rounding(variant.model, evidence.calls[number], stage, heads)


def _is_cell_explained(cell: Cell, before: Gaps, after: Gaps) -> bool:
    stage, number, _ = cell
    if cell in after.cells:
        return before.cells[cell].is_explained(after.cells[cell])
    # The heads of a stage that had another shape.
    others = [gap for (s, n, _), gap in after.cells.items() if (s, n) == (stage, number)]
    return bool(others) and all(before.cells[cell].is_explained(gap) for gap in others)


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
        model = gaps.replace_model_stage_in_heads(
            model, variant.model, stage, heads if some else None
        )
    return model, True


def _find_best_pair(evidence: Evidence, causes: Sequence[Cause]) -> list[NamedCause]:
    """Return two causes that explain a stage together, or nothing.

    One cause twice is no pair: that undoes what the first did, and is another name for anything. A
    statistical cause is in none: it would explain whatever a cause that replaces weights leaves.
    """
    stage = evidence.gaps.stages_beyond_rounding[0]
    concerned = [
        cause
        for cause in causes
        if not cause.is_statistical and stage in list_recorded_stages_of_cause(cause, evidence)
    ]
    parted, before = evidence.parted_calls_and_heads(stage), evidence.gaps.totals_of_stage(stage)
    nearest: list[tuple[tuple[float, float], int, Cause, Variant]] = []
    for cause in concerned:
        for variant in _yield_fitted_variants(cause, evidence):
            size = measure_gaps(variant.model, evidence.calls, [stage]).totals_of_stage(stage)
            size = (0.0, 0.0) if variant.is_step else size
            if variant.is_step or size < before:
                nearest.append((size, len(nearest), cause, variant))
    pairs: list[tuple[tuple[bool, float, float, int], int, list[NamedCause]]] = []
    for _, _, cause, variant in sorted(nearest)[:BEAM]:
        first = NamedCause(cause, variant, variant.model, tuple(parted))
        others = [each for each in concerned if each is not cause]
        for second in _find_best_single_cause(Evidence.of(variant.model, evidence.calls), others):
            after = measure_gaps(second.model, evidence.calls, [stage])
            if all(_is_cell_explained(cell, evidence.gaps, after) for cell in parted):
                first = replace(first, partner=second.cause.name)
                both = [first, replace(second, partner=cause.name)]
                pairs.append((second.sort_key, len(pairs), both))
    return min(pairs)[2] if pairs else []


def fit_variant(family: Family, evidence: Evidence, cells: Sequence[Cell]) -> Variant | None:
    """Return the variant that is nearest to the recorded stages in these cells.

    Gauss and Newton's method from the best starts, with a numerical derivative: where a variant
    is exact, each round doubles the number of right digits.
    """
    heads: dict[tuple[str, int], list[int]] = {}
    for stage, number, head in cells:
        heads.setdefault((stage, number), []).append(head)

    @cache
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
        predicted = None
        with suppress(OptionError):  # a number for which a scaling has no frequencies
            predicted = variant.model.predict_stage(stage, calls[number])
        if predicted is None or predicted.shape != actual.shape:
            return torch.full((1,), math.inf, dtype=torch.float64)
        if WHOLE not in heads:
            predicted, actual = predicted[:, heads], actual[:, heads]
        apart = (predicted - actual).flatten()[:MOST_ENTRIES]
        parts.append(apart.masked_fill(~apart.isfinite(), 0.0))
    return torch.cat(parts)


PROJECTED = {"q", "k", "v", "output"}  # the stages that multiply by weights


@dataclass(frozen=True, eq=False)
class ExplainedCalls:
    """Calls that were recorded, and the model that should predict them."""

    model: AttentionModel  # the attention that the recorded one should equal
    calls: Sequence[RecordedCall]
    names: Sequence[str]  # of the input of each call, for reports
    stored: torch.dtype = torch.float64  # of the recorded weights, which rounds what they were
    candidates: Sequence[Cause] = CAUSES  # that may be named
    side: str = "first"  # of the recorded one, for reports

    @cached_property
    def search(self) -> CauseSearchResult:
        """The causes why the calls part from the model.

        What they do not explain to the rounding of the run is explained to the rounding of the
        stored weights, if that leaves nothing.
        """
        if self.has_other_rows:  # which no cause changes
            return CauseSearchResult((), self.gaps)
        named = search_causes(Evidence(self.model, self.calls, self.gaps), self.candidates)
        if named.left.cells_beyond_rounding and self._has_weights_in_narrower_dtype:
            calls = [replace(call, dtype=self.stored) for call in self.calls]
            coarse = search_causes(Evidence.of(self.model, calls), self.candidates)
            if coarse.causes and not coarse.left.cells_beyond_rounding:
                model = coarse.causes[-1].model
                if all(self._is_output_in_dtype_of_weights(call, model) for call in self.calls):
                    return coarse
        return named

    @cached_property
    def has_other_rows(self) -> bool:
        """True if queries, values or outputs have another number of channels than the model's."""
        wq, wo = self.model.weights["wq"], self.model.weights["wo"]
        heads, value_dim, out_dim = wo.shape
        rows = {"q": wq.shape[0] * wq.shape[1], "head outputs": heads * value_dim}
        return any(
            x.shape[2] != out_dim if stage == "output" else x.shape[1::2].numel() != rows[stage]
            for call in self.calls
            for stage, x in call.stages.items()
            if stage == "output" or stage in rows
        )

    def _describe_shapes(self, stage: str) -> str:
        """Return the heads and channels of a stage in the first and in the second; "" for equal."""
        call = next(call for call in self.calls if stage in call.stages)
        recorded, weights = call.stages[stage].shape, self.model.weights
        owner = f"w{stage[0] if stage[0] in 'qkv' else 'o'}"
        axes, noun = ((1,), "heads") if stage in ("scores", "weights") else ((1, 3), "heads")
        expected = weights[owner].shape[: len(axes)]
        if stage == "output":
            axes, noun, expected = (2,), "channels", weights["wo"].shape[2:]
        pair = [tuple(recorded[axis] for axis in axes), tuple(expected)]
        if pair[0] == pair[1]:
            return ""
        first, second = pair if self.side == "first" else pair[::-1]
        if first[1:] == second[1:]:
            return f"{first[0]} {noun} against {second[0]}"
        return f"{first[0]} heads of {first[1]} channels against {second[0]} of {second[1]}"

    @cached_property
    def gaps(self) -> Gaps:
        """The gaps between the calls and the model, before any cause."""
        return measure_gaps(self.model, self.calls)

    @property
    def causes(self) -> tuple[FoundCause, ...]:
        """The causes as they are reported."""
        causes = self.search.causes
        everything = sum(each.size for each in causes if not each.partner)
        everything += max((each.size for each in causes if each.partner), default=0.0)
        everything += self.search.left.total_clipped_size(self.search.left.cells_beyond_rounding)
        return tuple(
            FoundCause(
                name=each.cause.name,
                parameters={**each.variant.parameters, **each.variant.details},
                stages=each.stages,
                heads=each.heads,
                repair=each.variant.repair,
                equals=each.equals,
                page=each.cause.page,
                side=self.side,
                share=each.size / everything if everything else 1.0,
                output_left=max(self._compare_output(call, each.model)[0] for call in self.calls),
                partner=each.partner,
            )
            for each in causes
        )

    @cached_property
    def gaps_by_position(self) -> dict[tuple[str, int], list[float]]:
        """(stage, number of the call) -> the size of its difference at each position it parts."""
        return {
            (stage, number): gaps.measure_gaps_by_position(self.model, self.calls[number], stage)
            for stage, number in dict.fromkeys(cell[:2] for cell in self.gaps.cells_beyond_rounding)
        }

    def _parted_positions(self, stage: str) -> tuple[int, ...] | None:
        """Return the tokens at which a stage parts in some call; None for all."""
        sizes = [
            (self.calls[number].past_key_count + n, size)
            for (name, number), by_position in self.gaps_by_position.items()
            for n, size in enumerate(by_position)
            if name == stage
        ]
        apart = {position for position, size in sizes if size}
        return None if apart == {position for position, _ in sizes} else tuple(sorted(apart))

    @cached_property
    def outputs_agree(self) -> bool:
        """True if rounding explains every difference of the outputs.

        Where the weights differ, that is the rounding of the dtype in which they are stored.
        """
        if all(is_rounding for _, is_rounding in self._output_gaps):
            return True
        has_other_weights = not PROJECTED.isdisjoint(self.gaps.stages_beyond_rounding)
        return (
            has_other_weights
            and self._has_weights_in_narrower_dtype
            and all(self._is_output_in_dtype_of_weights(call, self.model) for call in self.calls)
        )

    @property
    def agreement(self) -> list[bool]:
        """True for each call whose output differs by rounding at most."""
        return [is_rounding for _, is_rounding in self._output_gaps]

    @property
    def _has_weights_in_narrower_dtype(self) -> bool:
        """True if the weights are stored in a narrower dtype than the calls were computed in."""
        return any(is_coarser(self.stored, call.dtype) for call in self.calls)

    @property
    def verdict(self) -> Verdict:
        """The verdict, for a check that could have failed and outputs that may not be bitwise."""
        if self.outputs_agree:
            return Verdict.OTHER_WEIGHTS if self.gaps.cells_beyond_rounding else Verdict.TO_ROUNDING
        return Verdict.DIFFERENT if self.search.causes or self.has_other_rows else Verdict.UNKNOWN

    @property
    def parted_stages(self) -> tuple[PartedStage, ...]:
        """The stages that part although the stages before them are the same."""
        left = {*self.search.left.cells_beyond_rounding}
        parted = []
        for stage in self.gaps.stages_beyond_rounding:
            cells = [each for each in self.gaps.cells_beyond_rounding if each[0] == stage]
            heads = tuple(sorted({head for _, _, head in cells}))
            parted.append(
                PartedStage(
                    stage=stage,
                    size=max(self.gaps.cells[cell].size for cell in cells),
                    heads=None if WHOLE in heads else heads,
                    probes=tuple(dict.fromkeys(self.names[n] for _, n, _ in cells)),
                    is_explained=left.isdisjoint(cells),
                    positions=self._parted_positions(stage),
                    shapes=self._describe_shapes(stage),
                )
            )
        return tuple(parted)

    def report(self, **fields: Any) -> FunctionComparison:
        """Return the comparison of the calls; ``fields`` are those that they do not tell."""
        return FunctionComparison(
            **fields,
            output_gap=max(gap for gap, _ in self._output_gaps),
            stages=tuple(s for s in STAGES if any(s in call.stages for call in self.calls)),
            parted=self.parted_stages,
            causes=self.causes,
            gaps=self._stage_gaps,
        )

    @property
    def _stage_gaps(self) -> tuple[StageGaps, ...]:
        heads: dict[tuple[str, int], list[Gap]] = {}
        for (stage, number, _), gap in self.gaps.cells.items():
            heads.setdefault((stage, number), []).append(gap)
        return tuple(
            StageGaps(
                stage=stage,
                probe=self.names[number],
                call=number - self.names.index(self.names[number]),
                sizes=tuple(gap.size for gap in each),
                shares=tuple(gap.share for gap in each),
                by_position=tuple(self.gaps_by_position.get((stage, number), ())),
            )
            for (stage, number), each in heads.items()
        )

    @cached_property
    def _output_gaps(self) -> list[tuple[float, bool]]:
        """For each call the relative difference of its output; True if rounding explains it."""
        compared = [self._compare_output(call, self.model) for call in self.calls]
        return [
            (gap, bool(apart.dim() and _is_within(apart, gaps.allowed_difference(forced))))
            for gap, forced, apart in compared
        ]

    def _is_output_in_dtype_of_weights(self, call: RecordedCall, model: AttentionModel) -> bool:
        """True if rounding of the weights' dtype explains the difference of the last stage."""
        _, forced, apart = self._compare_output(call, model)
        if not apart.dim():
            return False
        return _is_within(apart, gaps.allow_output(model, forced.call, forced.stage, self.stored))

    @staticmethod
    def _compare_output(
        call: RecordedCall, model: AttentionModel
    ) -> tuple[float, ForcedStage, Tensor]:
        """Return how far the last recorded stage is from the model's: relative, and each entry."""
        last = [stage for stage in STAGES if stage in call.stages][-1]
        forced = model.prepare_stage(last, replace(call, stages={}))
        mine, theirs = call.stages[last], forced.result
        if mine.shape != theirs.shape:
            return torch.inf, forced, torch.tensor(torch.inf)
        apart = gaps.absolute_difference(theirs, mine)
        size = mine.norm().clamp_min(torch.finfo(torch.float64).tiny)
        return float(apart.norm() / size), forced, apart


def _is_within(apart: Tensor, allowed: Tensor) -> bool:
    return bool(((apart == 0) | (apart <= allowed)).all())
