"""Comparison of two whole models: the first attention that parts by its own doing, and why."""

from __future__ import annotations

from collections.abc import Iterator

from headwise.diagnosis.causes.cause import Cause
from headwise.diagnosis.diagnosis_result import Diagnosis, Verdict
from headwise.diagnosis.layer_pair import LayerPair
from headwise.diagnosis.model_comparison_result import LayerComparison, ModelComparison
from headwise.diagnosis.probe_inputs import SEED
from headwise.diagnosis.subjects.model_run_result import (
    ModelRun,
    exceeds_rounding,
    relative_difference_norm,
)
from headwise.errors import OptionError, ShapeError


def compare_runs(first: ModelRun, second: ModelRun) -> Diagnosis:
    """Return the diagnosis of two models that ran on the same input.

    Each attention of the first is computed by the settings and weights of the second from the
    input that it had. So a difference shows in the layers that make it, not in those after them.

    Raises:
        OptionError: the two have other numbers of attentions.
        ShapeError: two attentions take tokens of other widths.
    """
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
    layers = tuple(_compare_layers_in_order(first, second))
    gaps = _measure_output_gaps(first, second)
    if gaps:
        output_gap = max(gaps.values())
        has_other_output = any(
            exceeds_rounding(
                gap, first.float32_rounding_of_output(name), second.float32_rounding_of_output(name)
            )
            for name, gap in gaps.items()
        )
    else:
        output_gap = max(layer.comparison.output_gap for layer in layers)
        has_other_output = not all(layer.outputs_agree for layer in layers)
    comparison = ModelComparison(
        kinds=(first.kind, second.kind),
        inputs=first.inputs,
        seed=SEED,
        layers=layers,
        output_gap=output_gap,
        has_other_output=has_other_output,
    )
    return Diagnosis(verdict=_choose_verdict(comparison), model=comparison)


def _measure_output_gaps(first: ModelRun, second: ModelRun) -> dict[str, float]:
    """Return the relative difference of each output that both have; none of layers run apart."""
    mine, theirs = first.outputs or {}, second.outputs or {}
    return {
        name: relative_difference_norm(x, theirs[name])
        for name, x in mine.items()
        if name in theirs
    }


def _compare_layers_in_order(first: ModelRun, second: ModelRun) -> Iterator[LayerComparison]:
    named: list[Cause] = []  # in earlier layers: a cause is often that of all layers
    for mine, theirs in zip(first.layers, second.layers, strict=True):
        yield LayerPair(first, second, mine, theirs).compare(named)


def _choose_verdict(comparison: ModelComparison) -> Verdict:
    parted = comparison.differing_layers
    if (
        comparison.layers_with_blind_spot
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
