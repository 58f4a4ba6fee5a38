"""Recorded calls of an attention, explained by the model that should predict them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from headwise.diagnosis.causes.catalogue import CAUSES
from headwise.diagnosis.causes.cause import Cause, Evidence, cause_page_path
from headwise.diagnosis.results.attention import FoundCause, PartedStage, StageGaps
from headwise.diagnosis.results.diagnosis import Verdict
from headwise.diagnosis.search import CauseSearchResult, NamedCause, search_causes
from headwise.diagnosis.simulation.gaps import (
    WHOLE,
    Gap,
    Gaps,
    absolute_difference,
    measure_gaps,
    measure_gaps_by_position,
)
from headwise.diagnosis.simulation.model import AttentionModel
from headwise.diagnosis.simulation.rounding import allowed_difference
from headwise.diagnosis.simulation.stages import RecordedCall
from headwise.function.stages import STAGES

PROJECTED = {"q", "k", "v", "output"}  # the stages that multiply by weights


@dataclass(frozen=True, eq=False)
class ExplainedCalls:
    """Calls that were recorded, and the model that should predict them.

    Attributes:
        model: the attention that the recorded one should equal.
        calls: the recorded calls.
        names: of the input of each call, for reports.
        stored: dtype of the recorded weights, which may have rounded what was done to them.
        candidates: the causes that may be named.
        side: that of the recorded one, for reports.
    """

    model: AttentionModel
    calls: Sequence[RecordedCall]
    names: Sequence[str]
    stored: torch.dtype = torch.float64
    candidates: Sequence[Cause] = CAUSES
    side: str = "first"

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
            coarse = search_causes(
                Evidence.of(self.model, self._calls_in_dtype_of_weights), self.candidates
            )
            return named if coarse.left.cells_beyond_rounding else coarse
        return named

    @cached_property
    def has_other_rows(self) -> bool:
        """True if queries, values or outputs have another number of channels than the model's."""
        return any(
            stage in call.stages and _count_rows(call.stages[stage]) != rows
            for call in self.calls
            for stage, rows in _count_rows_of_model(self.model).items()
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
    def stage_names(self) -> tuple[str, ...]:
        """The stages that were recorded."""
        return tuple(s for s in STAGES if any(s in call.stages for call in self.calls))

    @property
    def is_explained_by_one_cause(self) -> bool:
        """True if at most one cause explains every difference."""
        return not self.search.left.cells_beyond_rounding and len(self.search.causes) < 2

    @property
    def causes(self) -> tuple[FoundCause, ...]:
        """The causes as they are reported."""
        causes = self.search.causes
        everything = sum(each.size for each in causes if not each.partner)
        everything += max((each.size for each in causes if each.partner), default=0.0)
        everything += self.search.left.total_clipped_size(self.search.left.cells_beyond_rounding)
        return tuple(
            replace(
                _make_found_cause(each, self.side),
                share=each.size / everything if everything else 1.0,
                output_left=max(
                    self._measure_last_stage_gap(each.model, call) for call in self.calls
                ),
            )
            for each in causes
        )

    def _measure_last_stage_gap(self, model: AttentionModel, call: RecordedCall) -> float:
        """Return the relative difference of the last stage of a call from that of a model."""
        last = [stage for stage in STAGES if stage in call.stages][-1]
        mine, theirs = call.stages[last], model.predict_stage(last, replace(call, stages={}))
        if mine.shape != theirs.shape:
            return torch.inf
        size = mine.norm().clamp_min(torch.finfo(torch.float64).tiny)
        return float(absolute_difference(theirs, mine).norm() / size)

    @cached_property
    def gaps_by_position(self) -> dict[tuple[str, int], list[float]]:
        """(stage, number of the call) -> the size of its difference at each position it parts."""
        parted = dict.fromkeys(
            (stage, number) for stage, number, _ in self.gaps.cells_beyond_rounding
        )
        return {
            (stage, number): measure_gaps_by_position(self.model, self.calls[number], stage)
            for stage, number in parted
        }

    def _parted_positions(self, stage: str) -> tuple[int, ...] | None:
        """Return the tokens at which a stage parts in some call; None for all."""
        apart, every = set[int](), set[int]()
        for (name, number), sizes in self.gaps_by_position.items():
            if name == stage:
                past = self.calls[number].past_key_count
                every |= {past + n for n in range(len(sizes))}
                apart |= {past + n for n, size in enumerate(sizes) if size}
        return None if apart == every else tuple(sorted(apart))

    @property
    def output_gap(self) -> float:
        """The largest relative difference of the outputs."""
        return max(gap for gap, _ in self._measure_output_gaps)

    @cached_property
    def outputs_agree(self) -> bool:
        """True if rounding explains every difference of the outputs.

        Where the weights differ, that is the rounding of the dtype in which they are stored.
        """
        if all(is_rounding for _, is_rounding in self._measure_output_gaps):
            return True
        has_other_weights = not PROJECTED.isdisjoint(self.gaps.stages_beyond_rounding)
        stored = (
            self._calls_in_dtype_of_weights
            if has_other_weights and self._has_weights_in_narrower_dtype
            else ()
        )
        return bool(stored) and all(self._measure_output_gap(call)[1] for call in stored)

    @property
    def _has_weights_in_narrower_dtype(self) -> bool:
        """True if the weights are stored in a narrower dtype than the calls were computed in."""
        return any(
            torch.finfo(self.stored).eps > torch.finfo(call.dtype).eps for call in self.calls
        )

    @property
    def _calls_in_dtype_of_weights(self) -> list[RecordedCall]:
        return [replace(call, dtype=self.stored) for call in self.calls]

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
            cells = [cell for cell in self.gaps.cells_beyond_rounding if cell[0] == stage]
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

    @property
    def stage_gaps(self) -> tuple[StageGaps, ...]:
        """The gaps of each stage and call, before any cause, for the report."""
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
    def _measure_output_gaps(self) -> list[tuple[float, bool]]:
        return [self._measure_output_gap(call) for call in self.calls]

    def _measure_output_gap(self, call: RecordedCall) -> tuple[float, bool]:
        """Return the relative difference of the last stage, and whether rounding explains it."""
        last = [stage for stage in STAGES if stage in call.stages][-1]
        bare = replace(call, stages={})
        forced = self.model.prepare_stage(last, bare)
        mine, theirs = call.stages[last], forced.compute_stage()
        if mine.shape != theirs.shape:
            return torch.inf, False
        apart = absolute_difference(theirs, mine)
        size = mine.norm().clamp_min(torch.finfo(torch.float64).tiny)
        is_rounding = bool(((apart == 0) | (apart <= allowed_difference(forced))).all())
        return float(apart.norm() / size), is_rounding


def _count_rows(stage: Tensor) -> int:
    """Return heads * channels of a stage, or the channels of the output."""
    return stage.shape[2] if stage.dim() == 3 else stage.shape[1] * stage.shape[3]


def _count_rows_of_model(model: AttentionModel) -> dict[str, int]:
    wq, wo = model.weights["wq"], model.weights["wo"]
    heads, value_dim, out_dim = wo.shape
    return {"q": wq.shape[0] * wq.shape[1], "head outputs": heads * value_dim, "output": out_dim}


def _make_found_cause(named: NamedCause, side: str) -> FoundCause:
    return FoundCause(
        name=named.cause.name,
        parameters={**named.variant.parameters, **named.variant.details},
        stages=tuple(named.stages),
        heads=None if named.heads is None else tuple(named.heads),
        repair=named.variant.repair,
        equals=named.equals,
        page=cause_page_path(named.cause.name),
        side=side,
        partner=named.partner,
    )
