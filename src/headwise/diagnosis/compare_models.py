"""Comparison of two whole models: the first attention that parts by its own doing, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from headwise.diagnosis.causes.cause import Cause
from headwise.diagnosis.diagnosis_result import Diagnosis, Verdict
from headwise.diagnosis.explained_calls import ExplainedCalls
from headwise.diagnosis.function_comparison import FunctionComparison
from headwise.diagnosis.model_comparison import LayerComparison, ModelComparison
from headwise.diagnosis.probes import SEED
from headwise.diagnosis.simulation.attention_model import AttentionModel
from headwise.diagnosis.simulation.gaps import gaps_of
from headwise.diagnosis.simulation.stages import RecordedCall
from headwise.diagnosis.subjects.model_run import LayerRun, ModelRun, relative_gap
from headwise.errors import OptionError

NO_DATA = "the settings of neither could be read: a class without a layout in the catalogue"


def compare_runs(first: ModelRun, second: ModelRun) -> Diagnosis:
    """Return the diagnosis of two models that ran on the same input.

    Each attention of the first is computed by the settings and weights of the second from the
    input that it had. So a difference shows in the layers that make it, not in those after them.

    Raises:
        OptionError: the two have other numbers of attentions.
    """
    if len(first.layers) != len(second.layers):
        raise OptionError(
            saw=f"{len(first.layers)} attentions in a, {len(second.layers)} in b",
            needed="models with the same number of attentions",
            do="compare layers of the two: compare(a_layer, b_layer)",
        )
    layers = tuple(_compared_layers(first, second))
    if first.output is None or second.output is None:
        output_gap = max(layer.comparison.output_gap for layer in layers)
        has_other_output = not all(layer.outputs_agree for layer in layers)
    else:
        output_gap = relative_gap(first.output, second.output)
        has_other_output = output_gap > max(first.output_rounding, second.output_rounding)
    comparison = ModelComparison(
        kinds=(first.kind, second.kind),
        inputs=first.inputs,
        seed=SEED,
        layers=layers,
        output_gap=output_gap,
        has_other_output=has_other_output,
    )
    return Diagnosis(verdict=_verdict(comparison), model=comparison)


def _compared_layers(first: ModelRun, second: ModelRun) -> Iterator[LayerComparison]:
    named: list[Cause] = []  # in earlier layers: a cause is often that of all layers
    for mine, theirs in zip(first.layers, second.layers, strict=True):
        gap = relative_gap(mine.call.inputs.x, theirs.call.inputs.x)
        model, call = _to_explain(mine, theirs)
        explained, exchanged_with = None, ""
        if model is not None:
            explained = ExplainedCalls(model, [call], [first.inputs], mine.stored)
            exchanged_with = (
                _layer_like(call, theirs, second.layers) if explained.gaps.parted else ""
            )
            if exchanged_with:
                explained = replace(explained, candidates=())  # the exchange explains it all
            else:
                explained = _by_named_causes(explained, named)
        yield LayerComparison(
            name=mine.name,
            other_name=theirs.name,
            input_gap=gap,
            has_other_input=gap > max(mine.input_rounding, theirs.input_rounding),
            comparison=_report(first, second, explained),
            outputs_agree=explained is None or explained.outputs_agree,
            exchanged_with=exchanged_with,
            note="" if explained else NO_DATA,
        )
        if explained and not exchanged_with:
            named += [n.cause for n in explained.search.causes if n.cause not in named]


def _to_explain(mine: LayerRun, theirs: LayerRun) -> tuple[AttentionModel | None, RecordedCall]:
    """Return the attention that is known as data, and the call of the other with its mask."""
    known, doubtful = (theirs, mine) if theirs.model else (mine, theirs)
    mask, call = known.call.inputs.mask, doubtful.call
    if known.call.inputs.x.shape[:2] == call.inputs.x.shape[:2]:
        call = replace(call, inputs=replace(call.inputs, mask=mask))
    return known.model, call


def _by_named_causes(explained: ExplainedCalls, named: Sequence[Cause]) -> ExplainedCalls:
    """Return the call explained by the causes that were named before, if they suffice."""
    likely = replace(explained, candidates=tuple(named))
    return likely if named and not likely.search.left.parted else explained


def _layer_like(call: RecordedCall, theirs: LayerRun, layers: Sequence[LayerRun]) -> str:
    """Return the other layer of the second model that computes the same; "" for none."""
    for layer in layers:
        if layer is not theirs and layer.model and not gaps_of(layer.model, [call]).parted:
            return layer.name
    return ""


def _report(
    first: ModelRun, second: ModelRun, explained: ExplainedCalls | None
) -> FunctionComparison:
    return FunctionComparison(
        kinds=(first.kind, second.kind),
        probes=(first.inputs,),
        seed=SEED,
        output_gap=explained.output_gap if explained else torch.nan,
        stages=explained.stages if explained else (),
        parted=explained.parted if explained else (),
        causes=explained.causes if explained else (),
        gaps=explained.stage_gaps if explained else (),
    )


def _verdict(comparison: ModelComparison) -> Verdict:
    parted = comparison.parted
    if not parted and not comparison.outside:
        is_bitwise = not any(layer.input_gap for layer in comparison.layers)
        return Verdict.SAME if is_bitwise and not comparison.output_gap else Verdict.TO_ROUNDING
    if not comparison.outside and not comparison.has_other_output:
        return Verdict.OTHER_WEIGHTS
    if any(layer.comparison.causes or layer.exchanged_with for layer in parted):
        return Verdict.DIFFERENT
    return Verdict.UNKNOWN
