"""Comparison of two attentions at the same place of two models that ran on the same input.

The first is computed by the settings and weights of the second, from the input that it had. Two
more facts decide whether that prediction may be believed: whether the second runs as its own
settings and weights state, and, where the inputs are the same, whether the recorded stages are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from headwise.diagnosis.blind_spots import (
    describe_unseen_setting,
    describe_unseen_window,
    explain_insensitivity_to_scores,
)
from headwise.diagnosis.causes.cause import Cause
from headwise.diagnosis.evidence import ExplainedCalls
from headwise.diagnosis.probes import SEED
from headwise.diagnosis.results.attention import FunctionComparison, GradientGap, PartedStage
from headwise.diagnosis.results.model import LayerComparison
from headwise.diagnosis.simulation.gaps import measure_gaps
from headwise.diagnosis.simulation.model import AttentionModel
from headwise.diagnosis.simulation.stages import Inputs, RecordedCall
from headwise.diagnosis.subjects.run import (
    LayerRun,
    ModelRun,
    exceeds_rounding,
    relative_difference_norm,
)
from headwise.diagnosis.subjects.subject import Subject, describe_dropout_difference
from headwise.function.budget import BACKWARD
from headwise.function.stages import STAGES

NO_DATA = (
    "the settings of neither could be read (a class without a layout in the catalogue), and their "
    "inputs differ"
)
NOT_AS_STATED = "neither runs as its settings and weights state, and their inputs differ"


@dataclass(frozen=True, eq=False)
class LayerPair:
    """Two attentions at the same place of two models.

    Attributes:
        first: the model in doubt.
        second: the model that it should equal.
        mine: the attention of the first.
        theirs: that of the second.
    """

    first: ModelRun
    second: ModelRun
    mine: LayerRun
    theirs: LayerRun

    def compare(self, named: list[Cause]) -> LayerComparison:
        """Compare the two; ``named`` has the causes of earlier layers, and gets those of this."""
        if self._known_model is None:
            return self._compare_stages_directly(NO_DATA)
        sides = ("second", "first") if self._known_side_run is self.theirs else ("first", "second")
        known, explained = (
            ExplainedCalls(
                self._known_model,
                [call],
                self._names_of_compared_inputs,
                self.mine.stored,
                side=side,
            )
            for call, side in zip(
                (self._known_side_run.call, self._call_to_explain), sides, strict=True
            )
        )
        known = replace(known, stored=self._known_side_run.stored)
        if known.gaps.cells_beyond_rounding and explained.gaps.cells_beyond_rounding:
            return self._compare_stages_directly(NOT_AS_STATED)
        if known.gaps.cells_beyond_rounding:
            is_of_second = self._known_side_run is self.theirs
            return self._report_explained_calls(
                _explain_by_named_causes(known, named), named, is_of_second=is_of_second
            )
        exchanged_with = (
            self._find_exchanged_layer() if explained.gaps.cells_beyond_rounding else ""
        )
        if exchanged_with:  # the exchange explains it all
            return self._report_explained_calls(
                replace(explained, candidates=()), named, exchanged_with=exchanged_with
            )
        return self._report_explained_calls(_explain_by_named_causes(explained, named), named)

    @property
    def _names_of_compared_inputs(self) -> list[str]:
        return [self.first.inputs]

    @property
    def _known_side_run(self) -> LayerRun:
        """The attention that is known as data, that of the second if both are."""
        return self.theirs if self.theirs.model else self.mine

    @property
    def _known_model(self) -> AttentionModel | None:
        return self._known_side_run.model

    @property
    def _call_to_explain(self) -> RecordedCall:
        """The call of the other, with the mask of the known one."""
        call = self.mine.call if self._known_side_run is self.theirs else self.theirs.call
        known = self._known_side_run.call.inputs
        if known.x.shape[:2] == call.inputs.x.shape[:2]:
            call = replace(call, inputs=replace(call.inputs, mask=known.mask))
        return call

    @property
    def _input_gap(self) -> float:
        return relative_difference_norm(self.mine.call.inputs.x, self.theirs.call.inputs.x)

    @property
    def _has_other_input(self) -> bool:
        roundings = self.mine.input_rounding, self.theirs.input_rounding
        return exceeds_rounding(self._input_gap, *roundings)

    def _describe_blind_spot(self) -> str:
        """Return the reason why this input could not show another attention; "" if it could."""
        mine, theirs = self.mine.model, self.theirs.model
        dropout = describe_dropout_difference(self.mine.dropout, self.theirs.dropout)
        if dropout:
            return dropout
        if self.mine.window != self.theirs.window:
            return describe_unseen_window(
                self.mine.window, self.theirs.window, [self._call_to_explain]
            )
        calls = [self._call_to_explain]
        if unseen := describe_unseen_setting(mine, theirs, calls, calls[0].dtype):
            return unseen
        if self._known_model is None or (mine and theirs and mine.is_equal(theirs)):
            return ""
        return explain_insensitivity_to_scores(
            self._known_model, [self._call_to_explain], self._call_to_explain.dtype
        )

    def _find_exchanged_layer(self) -> str:
        """Return the other layer of the second model that computes the same; "" for none."""
        for layer in self.second.layers:
            if layer is self.theirs or layer.model is None:
                continue
            if not measure_gaps(layer.model, [self._call_to_explain]).cells_beyond_rounding:
                return layer.name
        return ""

    def _compare_stages_directly(self, reason: str) -> LayerComparison:
        """Compare the recorded stages; ``reason`` says why, where that is not possible either."""
        if self._has_other_input:
            return self._make_layer_comparison(self._make_empty_comparison(), note=reason)
        mine, theirs = self.mine.call.stages, self.theirs.call.stages
        common = tuple(stage for stage in STAGES if stage in mine and stage in theirs)
        gaps = {stage: relative_difference_norm(mine[stage], theirs[stage]) for stage in common}
        parted = tuple(
            PartedStage(stage=stage, size=gap, heads=None, probes=(self.first.inputs,))
            for stage, gap in gaps.items()
            if exceeds_rounding(
                gap,
                self.mine.float32_rounding_of_stage(stage),
                self.theirs.float32_rounding_of_stage(stage),
            )
        )
        report = replace(
            self._make_empty_comparison(),
            stages=common,
            parted=parted,
            blind="" if parted else self._describe_blind_spot(),
            output_gap=gaps[common[-1]] if common else torch.nan,
        )
        return self._make_layer_comparison(report, outputs_agree=not parted)

    def _report_explained_calls(
        self,
        explained: ExplainedCalls,
        named: list[Cause],
        *,
        exchanged_with: str = "",
        is_of_second: bool = False,
    ) -> LayerComparison:
        report = replace(
            self._make_empty_comparison(),
            blind=self._describe_blind_spot() if explained.outputs_agree else "",
            output_gap=explained.output_gap,
            stages=explained.stage_names,
            parted=explained.parted_stages,
            causes=explained.causes,
            gaps=explained.stage_gaps,
        )
        if not exchanged_with:
            causes = [each.cause for each in explained.search.causes]
            named += [cause for cause in causes if cause not in named]
        return self._make_layer_comparison(
            report,
            outputs_agree=explained.outputs_agree,
            exchanged_with=exchanged_with,
            is_of_second=is_of_second,
        )

    def _make_empty_comparison(self) -> FunctionComparison:
        return FunctionComparison(
            kinds=(self.first.kind, self.second.kind),
            probes=(self.first.inputs,),
            seed=SEED,
            output_gap=torch.nan,
            stages=(),
        )

    def _make_layer_comparison(
        self,
        comparison: FunctionComparison,
        *,
        outputs_agree: bool = True,
        exchanged_with: str = "",
        is_of_second: bool = False,
        note: str = "",
    ) -> LayerComparison:
        return LayerComparison(
            name=self.mine.name,
            other_name=self.theirs.name,
            input_gap=self._input_gap,
            has_other_input=self._has_other_input,
            comparison=comparison,
            outputs_agree=outputs_agree,
            exchanged_with=exchanged_with,
            is_of_second=is_of_second,
            note=note,
        )


def _explain_by_named_causes(explained: ExplainedCalls, named: Sequence[Cause]) -> ExplainedCalls:
    """Return the call explained by the causes that were named before, if they suffice."""
    likely = replace(explained, candidates=tuple(named))
    return likely if named and not likely.search.left.cells_beyond_rounding else explained


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
