"""Comparison of two attentions at the same place of two models that ran on the same input.

The first is computed by the settings and weights of the second, from the input that it had. Two
more facts decide whether that prediction may be believed: whether the second runs as its own
settings and weights state, and, where the inputs are the same, whether the recorded stages are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from headwise.diagnosis import probes, unseen
from headwise.diagnosis.explained import ExplainedCalls, explain_other_way
from headwise.diagnosis.outputs.runs import Runs
from headwise.diagnosis.simulation.gaps import measure_gaps
from headwise.diagnosis.simulation.model import AttentionModel, RecordedCall, key_query_distances
from headwise.diagnosis.subjects.run import LayerRun, ModelRun, measure_input_gap
from headwise.diagnosis.subjects.subject import describe_dropout_difference
from headwise.errors import OptionError, ShapeError
from headwise.function.records import STAGES
from headwise.function.rounding import exceeds_rounding, relative_difference_norm
from headwise.identify import catalogue
from headwise.identify.comparison import (
    SEED,
    FunctionComparison,
    LayerComparison,
    ModelComparison,
    PartedStage,
    format_noun_with_numbers,
)
from headwise.identify.results import Diagnosis, Verdict

Outputs = Mapping[str, Tensor]  # of a model, by name


def compare_runs(first: ModelRun, second: ModelRun) -> Diagnosis:
    """Return the diagnosis of two models that ran on the same input.

    Each attention of the first is computed by the settings and weights of the second from the
    input that it had. So a difference shows in the layers that make it, not in those after them.

    Raises:
        OptionError: the two have other numbers of attentions.
        ShapeError: two attentions take tokens of other widths.
    """
    _require_comparable_layers(first, second)
    named = Named()
    layers = tuple(
        LayerPair(first, second, mine, theirs).compare(named)
        for mine, theirs in zip(first.layers, second.layers, strict=True)
    )
    ran_apart = first.outputs is None or second.outputs is None
    mine, theirs = first.outputs or {}, second.outputs or {}
    pairs = _pair_outputs(mine, theirs)
    uncompared = "" if ran_apart else _describe_uncompared_outputs(mine, theirs, pairs)
    gaps = {name: relative_difference_norm(mine[name], theirs[pairs[name]]) for name in pairs}
    has_other_output = any(
        exceeds_rounding(
            gap,
            first.output_roundings.get(name, 0.0),
            second.output_roundings.get(pairs[name], 0.0),
        )
        for name, gap in gaps.items()
    )
    if ran_apart or uncompared:
        has_other_output |= not all(layer.outputs_agree for layer in layers)
    of_layers = [layer.comparison.output_gap for layer in layers]
    comparison = ModelComparison(
        kinds=(first.kind, second.kind),
        inputs=first.inputs,
        seed=SEED,
        layers=layers,
        output_gap=max(of_layers if ran_apart else gaps.values(), default=torch.nan),
        has_other_output=has_other_output,
        ran_apart=ran_apart,
        uncompared=uncompared,
    )
    return Diagnosis(verdict=_choose_verdict(comparison), model=comparison)


def _require_comparable_layers(first: ModelRun, second: ModelRun) -> None:
    if len(first.layers) != len(second.layers):
        raise OptionError(
            saw=f"{len(first.layers)} attentions in a, {len(second.layers)} in b",
            needed="models with the same number of attentions",
            do="compare layers of the two: compare(a_layer, b_layer)",
        )
    for mine, theirs in zip(first.layers, second.layers, strict=True):
        widths = [layer.call.inputs.x.shape[-1] for layer in (mine, theirs)]
        if len({*widths} - {0}) > 1:
            raise ShapeError(
                saw=f"`{mine.name}` takes tokens of width {widths[0]}, `{theirs.name}` of width "
                f"{widths[1]}",
                needed="models of the same width",
                do="compare a model with the one that it was made from",
            )


def _pair_outputs(first: Outputs, second: Outputs) -> dict[str, str]:
    """Return the outputs to compare: of one name and shape, of one shape, of one name."""
    pairs: dict[str, str] = {}
    rules: tuple[Callable[[str, str], bool], ...] = (
        lambda mine, theirs: mine == theirs and first[mine].shape == second[theirs].shape,
        lambda mine, theirs: first[mine].dim() > 0 and first[mine].shape == second[theirs].shape,
        lambda mine, theirs: mine == theirs,
    )
    for rule in rules:
        for mine in first:
            left = [name for name in second if name not in pairs.values()]
            partner = next((theirs for theirs in left if rule(mine, theirs)), None)
            if mine not in pairs and partner is not None:
                pairs[mine] = partner
    return pairs


def _describe_uncompared_outputs(first: Outputs, second: Outputs, pairs: Mapping[str, str]) -> str:
    """Return the reason why the main output of a model was not compared; "" if both were."""
    sides = ("first", first, pairs.keys()), ("second", second, pairs.values())
    for side, outputs, paired in sides:
        main = next((name for name, x in outputs.items() if x.dim()), None)
        if main is None:
            return f"the {side} returns no tensor of floating-point numbers"
        if main not in paired:
            name = f"`{main.lstrip('.')}`" if main else "the output"
            return (
                f"{name} of the {side} has shape {tuple(outputs[main].shape)}, and no output of "
                "the other has this name or shape"
            )
    return ""


def _choose_verdict(comparison: ModelComparison) -> Verdict:
    parted = comparison.differing_layers
    if (
        (comparison.layers_with_blind_spot or comparison.uncompared)
        and not comparison.difference_outside_attention
        and not comparison.has_other_output
    ):
        return Verdict.INCONCLUSIVE
    if not parted and not comparison.difference_outside_attention:
        is_bitwise = not any(layer.input_gap for layer in comparison.layers)
        return Verdict.SAME if is_bitwise and not comparison.output_gap else Verdict.TO_ROUNDING
    if not comparison.difference_outside_attention and not comparison.has_other_output:
        return Verdict.OTHER_WEIGHTS
    if any(layer.comparison.causes or layer.exchanged_with for layer in parted):
        return Verdict.DIFFERENT
    return Verdict.UNKNOWN


NO_DATA = (
    "the settings of neither could be read (a class without a layout in the catalogue), and their "
    "inputs differ"
)
NOT_AS_STATED = "neither runs as its settings and weights state, and their inputs differ"


@dataclass(eq=False)
class Named:
    """Findings in earlier layers: a fault is often that of all layers.

    Attributes:
        causes: those that were named.
        unexplained: the stages that parted where a search explained not all of them; it is not
            repeated in other layers.
    """

    causes: list[catalogue.Cause] = field(default_factory=list)
    unexplained: set[tuple[str, ...]] = field(default_factory=set)


@dataclass(frozen=True, eq=False)
class LayerPair:
    """Two attentions at the same place of two models."""

    first: ModelRun  # the model in doubt
    second: ModelRun  # the model that it should equal
    mine: LayerRun  # the attention of the first
    theirs: LayerRun

    def compare(self, named: Named) -> LayerComparison:
        """Compare the two; ``named`` has the causes of earlier layers, and gets those of this."""
        if (model := self._known.model) is None:
            return self._compare_stages_directly(NO_DATA)
        sides = ("second", "first") if self._known is self.theirs else ("first", "second")
        given = zip(
            (self._known.call, self._call_to_explain),
            (self._known.stored, self.mine.stored),
            sides,
            strict=True,
        )
        known, explained = (
            ExplainedCalls(causal, [bare], [self.first.inputs], stored, side=side)
            for call, stored, side in given
            for causal, bare in [_take_causality(model, call)]
        )
        if known.gaps.cells_beyond_rounding and explained.gaps.cells_beyond_rounding:
            return self._compare_stages_directly(NOT_AS_STATED)
        if known.gaps.cells_beyond_rounding:
            is_of_second = self._known is self.theirs
            return self._report_explained_calls(known, named, is_of_second=is_of_second)
        exchanged = self._find_exchanged_layer() if explained.gaps.cells_beyond_rounding else ""
        return self._report_explained_calls(explained, named, exchanged_with=exchanged)

    @property
    def _known(self) -> LayerRun:
        """The attention that is known as data, that of the second if both are."""
        return self.theirs if self.theirs.model else self.mine

    @property
    def _call_to_explain(self) -> RecordedCall:
        """The call of the other, with the mask of the known one."""
        call = self.mine.call if self._known is self.theirs else self.theirs.call
        known = self._known.call.inputs
        if known.x.shape[:2] == call.inputs.x.shape[:2]:
            call = replace(call, inputs=replace(call.inputs, mask=known.mask))
        return call

    @property
    def _input_gap(self) -> float:
        return measure_input_gap(self.mine.call.inputs, self.theirs.call.inputs)

    @property
    def _has_other_input(self) -> bool:
        roundings = self.mine.input_rounding, self.theirs.input_rounding
        return exceeds_rounding(self._input_gap, *roundings)

    def _describe_blind_spot(self) -> str:
        """Return the reason why this input could not show another attention; "" if it could."""
        mine, theirs, calls = self.mine.model, self.theirs.model, [self._call_to_explain]
        if dropout := describe_dropout_difference(self.mine.dropout, self.theirs.dropout):
            return dropout
        if mine is None or theirs is None:
            window, length = self._known.window, calls[0].inputs.key_source.shape[1]
            if window is not None and window[0] is not None and window[0] >= length - 1:
                return unseen.describe_window((self.mine.window, self.theirs.window), calls)
        else:  # with the windows that calls have in their masks
            pairs = ((mine, self.mine.window), (theirs, self.theirs.window))
            mine, theirs = (m.with_settings(window=w) if w else m for m, w in pairs)
        if setting := unseen.describe_setting(mine, theirs, calls, calls[0].dtype):
            return setting
        if self._known.model is None or (mine and theirs and mine.is_equal(theirs)):
            return ""
        return unseen.explain_scores(self._known.model, calls, calls[0].dtype)

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
            note = "; ".join((reason, *list_visible_keys(self.mine.call, self.theirs.call)))
            return self._make_layer_comparison(self._make_comparison(), note=note)
        mine, theirs = self.mine.call.stages, self.theirs.call.stages
        common = tuple(stage for stage in STAGES if stage in mine and stage in theirs)
        gaps = {stage: relative_difference_norm(mine[stage], theirs[stage]) for stage in common}
        parted = tuple(
            PartedStage(stage=stage, size=gap, heads=None, probes=(self.first.inputs,))
            for stage, gap in gaps.items()
            if exceeds_rounding(
                gap, *(each.roundings.get(stage, 0.0) for each in (self.mine, self.theirs))
            )
        )
        report = self._make_comparison(
            stages=common,
            parted=parted,
            blind="" if parted else self._describe_blind_spot(),
            output_gap=gaps[common[-1]] if common else torch.nan,
        )
        return self._make_layer_comparison(report, outputs_agree=not parted)

    def _report_explained_calls(
        self,
        explained: ExplainedCalls,
        named: Named,
        *,
        exchanged_with: str = "",
        is_of_second: bool = False,
    ) -> LayerComparison:
        """Report the calls: by an exchange, else by the causes named before where they suffice."""
        parted = tuple(explained.gaps.stages_beyond_rounding)
        shown: ExplainedCalls | None = None
        if exchanged_with:
            explained = replace(explained, candidates=())
        elif parted:
            likely = replace(explained, candidates=tuple(named.causes))
            is_known = parted in named.unexplained
            explained = likely if likely.explains_all or is_known else explained
            shown = self._explain_by_outputs(explained, named, again=not is_known)
            if shown is None and not explained.explains_all:
                named.unexplained.add(parted)
                explained = self._explain_with_roles_swapped() or explained
        blind = self._describe_blind_spot() if explained.outputs_agree else ""
        other = None if is_of_second else self.mine.model
        changed = () if shown else (*explained.describe_projections(other),)
        report = explained.report(**self._stated, blind=blind, isolated=changed)
        if shown is not None:
            apart = tuple(replace(each, is_explained=True) for each in report.parted)
            report = replace(report, causes=shown.causes, parted=apart)
            explained = shown
        if not exchanged_with:
            causes = [each.cause for each in explained.search.causes]
            named.causes += [cause for cause in causes if cause not in named.causes]
        more = {"exchanged_with": exchanged_with, "is_of_second": is_of_second}
        return self._make_layer_comparison(report, outputs_agree=explained.outputs_agree, **more)

    def _explain_by_outputs(
        self, explained: ExplainedCalls, named: Named, *, again: bool
    ) -> ExplainedCalls | None:
        """Return what explains the outputs of an attention that can be run on other tokens.

        None where one cause of the recorded stages does, or nothing does. ``again`` tries all
        causes, and not only those of earlier layers.
        """
        [call], layer = explained.calls, self.mine if explained.side == "first" else self.theirs
        runs = None if explained.outputs_agree else layer.make_runs(call)
        if runs is None:
            return None
        calls, names = _run_probes(runs, call, self.first.inputs)
        causes = explained.search.causes
        is_whole = len(causes) == 1 and explained.explains_all
        if is_whole and not measure_gaps(causes[0].model, calls).cells_beyond_rounding:
            return None
        shown = replace(explained, calls=calls, names=names)
        for candidates in (tuple(named.causes), explained.candidates)[: 1 + again]:
            shown = replace(shown, candidates=candidates)
            if shown.search.causes and shown.explains_all:
                return shown
        return None

    def _explain_with_roles_swapped(self) -> ExplainedCalls | None:
        """Return the call of the second as the first explains it, by heads that it lacks."""
        swapped = LayerPair(self.second, self.first, self.theirs, self.mine)
        return explain_other_way(
            self.mine.model if self._known is self.theirs else None,
            [self.mine.call],
            [swapped._call_to_explain],
            [self.first.inputs],
            self.theirs.stored,
            (catalogue.HEADS_GONE, catalogue.KV_HEADS_MERGED),
            "second",
        )

    @property
    def _stated(self) -> dict[str, Any]:
        kinds = (self.first.kind, self.second.kind)
        return {"kinds": kinds, "probes": (self.first.inputs,), "seed": SEED}

    def _make_comparison(self, **fields: Any) -> FunctionComparison:
        fields = {"output_gap": torch.nan, "stages": (), **self._stated, **fields}
        return FunctionComparison(**fields)

    def _make_layer_comparison(
        self, comparison: FunctionComparison, *, outputs_agree: bool = True, **more: Any
    ) -> LayerComparison:
        if {"scores", "weights"} & {*comparison.unexplained_places}:
            seen = list_visible_keys(self.mine.call, self.theirs.call)
            comparison = replace(comparison, isolated=(*seen, *comparison.isolated))
        return LayerComparison(
            name=self.mine.name,
            other_name=self.theirs.name,
            input_gap=self._input_gap,
            has_other_input=self._has_other_input,
            comparison=comparison,
            outputs_agree=outputs_agree,
            **more,
        )


def _run_probes(runs: Runs, call: RecordedCall, name: str) -> tuple[list[RecordedCall], list[str]]:
    """Return calls with their outputs alone: the recorded one, and those on inputs that are made.

    The recorded one is left out where its output was not.
    """
    inputs = call.inputs
    widths, length = (inputs.x.shape[2], inputs.key_source.shape[2]), inputs.x.shape[1]
    lengths, crosses = (length, min(probes.FEW, length), length), inputs.source is not None
    made = probes.make_probe_inputs(
        widths, crosses=crosses, takes_mask=False, parts=True, lengths=lengths
    )
    calls = []
    if "output" in call.stages:
        calls.append((replace(call, stages={"output": call.stages["output"]}, runs=runs), name))
    for probe in made:
        with suppress(OptionError):
            calls.append((replace(runs.record(probe.inputs), runs=runs), probe.name))
    return [each for each, _ in calls], [each for _, each in calls]


def _take_causality(
    model: AttentionModel, call: RecordedCall
) -> tuple[AttentionModel, RecordedCall]:
    """Return a model that hides later keys by itself, and a call without them in its mask.

    Both are as they are where the mask is no triangle beside hidden keys.
    """
    mask, inputs = call.inputs.mask, call.inputs
    if mask is None or inputs.source is not None or call.earlier:
        return model, call
    keys = mask.any(2, keepdim=True)
    seen = keys & (key_query_distances(call) <= 0)
    if not torch.equal(*torch.broadcast_tensors(mask, seen)):
        return model, call
    inputs = replace(inputs, mask=None if bool(keys.all()) else keys)
    return model.with_settings(window=(None, 0)), replace(call, inputs=inputs)


def list_visible_keys(first: RecordedCall, second: RecordedCall) -> Iterator[str]:
    """Yield which queries see keys by one mask that they do not see by the other."""
    masks = [call.inputs.mask for call in (first, second) if call.inputs.mask is not None]
    if len(masks) < 2 or masks[0].shape[2:] != masks[1].shape[2:]:
        return
    for side, (mine, other) in (("first", masks), ("second", masks[::-1])):
        pairs = (mine & ~other).flatten(0, 1).any(0)
        queries, keys = (pairs.any(axis).nonzero().flatten().tolist() for axis in (1, 0))
        if queries:
            who = format_noun_with_numbers("position", queries)
            some = "" if int(pairs.sum()) == len(queries) * len(keys) else "some of "
            yield f"{who} of the {side} also see {some}{format_noun_with_numbers('key', keys)}"
