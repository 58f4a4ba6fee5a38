"""Gaps between a model and recorded calls, stage by stage and head by head."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from headwise.diagnosis.simulation.model import AttentionModel, ForcedStage
from headwise.diagnosis.simulation.rounding import allowed_difference, is_far_beyond_rounding
from headwise.diagnosis.simulation.stages import RecordedCall
from headwise.function.stages import BEFORE, STAGES

# (stage, number of the call, head); the head is -1 for the output, and where shapes differ.
Cell = tuple[str, int, int]
WHOLE = -1


@dataclass(frozen=True)
class Gap:
    """Difference of one head's stage in one call.

    Attributes:
        size: norm of the difference over the norm of the recorded entries; infinite where shapes
            or hidden keys differ.
        share: the largest difference as a share of what rounding explains.
        left: the share of entries whose difference rounding does not explain.
        largest: the largest difference.
        bound: the smallest difference that rounding does not explain.
    """

    size: float
    share: float
    left: float
    largest: float = math.inf
    bound: float = 0.0

    @property
    def is_rounding(self) -> bool:
        """True if rounding explains the difference."""
        return self.share <= 1

    def is_explained(self, after: Gap) -> bool:
        """True if rounding explains what a cause leaves, and would not explain all of this gap.

        Rounding explains anything where the scores of a cause are large numbers of a narrow dtype.
        """
        return after.is_rounding and not self.largest <= after.bound  # a bound may be NaN


@dataclass(frozen=True)
class Gaps:
    """Gaps of every cell that was compared."""

    cells: dict[Cell, Gap] = field(default_factory=dict)

    @cached_property
    def cells_beyond_rounding(self) -> list[Cell]:
        """The cells that rounding does not explain, in the order of the stages."""
        return [cell for cell, gap in self.cells.items() if not gap.is_rounding]

    @property
    def stages_beyond_rounding(self) -> list[str]:
        """The stages with parted cells, in order."""
        return list(dict.fromkeys(stage for stage, _, _ in self.cells_beyond_rounding))

    def total_clipped_size(self, cells: Iterable[Cell]) -> float:
        """Return the sum of the sizes of cells, each at most 1."""
        return sum(min(self.cells[cell].size, 1.0) for cell in cells if cell in self.cells)

    def totals_of_stage(self, stage: str) -> tuple[float, float]:
        """Return the sums of the unexplained shares of entries, and of sizes of at most 1.

        They are infinite for a stage that could not be compared.
        """
        gaps = [gap for (name, _, _), gap in self.cells.items() if name == stage]
        if not gaps:
            return math.inf, math.inf
        return sum(gap.left for gap in gaps), sum(min(gap.size, 1.0) for gap in gaps)


def measure_gaps(
    model: AttentionModel, calls: Sequence[RecordedCall], stages: Sequence[str] = STAGES
) -> Gaps:
    """Compare recorded stages with those that the model computes from the stages before them.

    Stages that follow one of another shape are not compared.
    """
    cells: dict[Cell, Gap] = {}
    # Stages that cannot be computed from recorded ones of other shapes.
    misshapen = set[str]().union(*[_list_misshapen_stages(model, call) for call in calls])
    for stage in STAGES:
        if not misshapen.isdisjoint(BEFORE[stage]):
            misshapen.add(stage)
        if stage not in stages or stage in misshapen:
            continue
        for number, call in enumerate(calls):
            if stage in call.stages:
                gaps = _measure_gaps_by_head(model, call, stage)
                cells |= {(stage, number, head): gap for head, gap in gaps.items()}
                misshapen |= {stage} if WHOLE in gaps else set()
    return Gaps(cells)


def _list_misshapen_stages(model: AttentionModel, call: RecordedCall) -> set[str]:
    """Return the stages that follow recorded ones of other heads than the model's.

    Recorded stages before a stage also have the same number of sequences.
    """
    misshapen: set[str] = set()
    has_other_heads: set[str] = set()
    for stage, before in BEFORE.items():
        batches = set()
        for each in before:
            if each in call.stages:
                batches.add(len(call.stages[each]))
        if len(batches) > 1 or not (misshapen | has_other_heads).isdisjoint(before):
            misshapen.add(stage)
        recorded = call.stages.get(stage)
        if recorded is not None and stage != "output":
            role = stage[0] if stage[0] in "qkv" else "o"
            count, width = model.weights[f"w{role}"].shape[:2]
            is_square = stage in ("scores", "weights")
            if recorded.shape[1] != count or (recorded.shape[3] != width and not is_square):
                has_other_heads.add(stage)
    return misshapen


def all_heads_agree_within_rounding(
    model: AttentionModel, call: RecordedCall, stage: str, heads: Sequence[int]
) -> bool:
    """True if rounding explains what is left between the model and these heads of a stage."""
    if stage in _list_misshapen_stages(model, call):
        return False
    forced, actual = model.prepare_stage(stage, call), call.stages[stage]
    predicted = forced.compute_stage()
    if predicted.shape != actual.shape:
        return False
    apart = absolute_difference(predicted, actual)
    chosen = apart if WHOLE in heads else apart[:, list(heads)]
    if is_far_beyond_rounding(forced, chosen):
        return False
    is_rounding = (apart == 0) | (apart <= _rounding_bound(forced, actual))  # a bound may be NaN
    chosen = is_rounding if WHOLE in heads else is_rounding[:, list(heads)]
    return bool(chosen.all())


def _rounding_bound(forced: ForcedStage, actual: Tensor) -> Tensor:
    """Return what rounding explains, of the shape of the recorded stage."""
    bound = allowed_difference(forced)
    return bound if bound.shape == actual.shape else bound.max().expand(actual.shape)


def _measure_gaps_by_head(model: AttentionModel, call: RecordedCall, stage: str) -> dict[int, Gap]:
    forced, actual = model.prepare_stage(stage, call), call.stages[stage]
    predicted = forced.compute_stage()
    if predicted.shape != actual.shape:
        return {WHOLE: Gap(math.inf, math.inf, math.inf)}
    apart, bound = absolute_difference(predicted, actual), _rounding_bound(forced, actual)
    heads = [WHOLE] if stage == "output" else list(range(actual.shape[1]))
    by_head = [
        (x[None] if stage == "output" else x.transpose(0, 1)).flatten(1)
        for x in (apart, actual.masked_fill(~actual.isfinite(), 0.0), bound)
    ]
    gap, size, limit = by_head
    norms, sizes = gap.norm(dim=1), size.norm(dim=1)
    relative = torch.where(sizes > 0, norms / sizes, (norms > 0).double())
    shares = (gap / limit).masked_fill(gap == 0, 0.0).amax(1)
    left = (gap > limit).double().mean(1)
    finite = gap.isfinite().all(1)[:, None]
    numbers = torch.stack([relative, shares], 1).masked_fill(~finite, math.inf)
    numbers = torch.cat([numbers, left[:, None], gap.amax(1, True), limit.amin(1, True)], 1)
    return {head: Gap(*each) for head, each in zip(heads, numbers.tolist(), strict=True)}


def measure_gaps_by_position(model: AttentionModel, call: RecordedCall, stage: str) -> list[float]:
    """Return the relative difference of a stage at each query or key; 0 where it is rounding.

    Nothing is returned for a stage of another shape.
    """
    forced, actual = model.prepare_stage(stage, call), call.stages[stage]
    predicted = forced.compute_stage()
    if predicted.shape != actual.shape:
        return []
    axis = 1 if stage == "output" else 2
    apart, bound, size = (
        x.transpose(0, axis).flatten(1)
        for x in (
            absolute_difference(predicted, actual),
            _rounding_bound(forced, actual),
            actual.masked_fill(~actual.isfinite(), 0.0),
        )
    )
    parts = ((apart != 0) & ~(apart <= bound)).any(1)
    relative = apart.norm(dim=1) / size.norm(dim=1)
    sizes = torch.where(parts, relative.nan_to_num(math.inf), 0.0)
    numbers: list[float] = sizes.tolist()
    return numbers


def absolute_difference(predicted: Tensor, actual: Tensor) -> Tensor:
    """Return the absolute difference; 0 for equal infinities and two NaNs, else infinite."""
    equal = (predicted == actual) | (predicted.isnan() & actual.isnan())
    return (predicted - actual).abs().nan_to_num(math.inf).masked_fill(equal, 0.0)


def replace_model_stage_in_heads(
    base: AttentionModel, changed: AttentionModel, stage: str, heads: Sequence[int] | None
) -> AttentionModel:
    """Return ``base`` with a stage of ``changed``, in some heads alone (all for None or WHOLE)."""

    def stage_function(forced: ForcedStage) -> Tensor:
        other = ForcedStage(changed, forced.call, stage).compute_stage()
        if heads is None or WHOLE in heads:
            return other
        usual = ForcedStage(base, forced.call, stage).compute_stage()
        chosen = torch.zeros(usual.shape[1], dtype=torch.bool)
        chosen[list(heads)] = True
        return torch.where(chosen[:, None, None], other, usual)

    return replace(base, replaced={**base.replaced, stage: stage_function})
