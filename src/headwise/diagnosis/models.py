"""Comparison of two whole models: the first attention that parts by its own doing, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from headwise.diagnosis.causes.cause import Cause
from headwise.diagnosis.pair import LayerPair
from headwise.diagnosis.probes import SEED
from headwise.diagnosis.results.diagnosis import Diagnosis, Verdict
from headwise.diagnosis.results.model import LayerComparison, ModelComparison
from headwise.diagnosis.subjects.run import ModelRun, exceeds_rounding, relative_difference_norm
from headwise.errors import OptionError, ShapeError

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
    layers = tuple(_compare_layers_in_order(first, second))
    ran_apart = first.outputs is None or second.outputs is None
    mine, theirs = first.outputs or {}, second.outputs or {}
    pairs = _pair_outputs(mine, theirs)
    uncompared = "" if ran_apart else _describe_uncompared_outputs(mine, theirs, pairs)
    gaps = {name: relative_difference_norm(mine[name], theirs[pairs[name]]) for name in pairs}
    has_other_output = any(
        exceeds_rounding(
            gap,
            first.float32_rounding_of_output(name),
            second.float32_rounding_of_output(pairs[name]),
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
    """Return the names of the outputs to compare: of one name and shape, of one shape, of one name.

    Outputs of one shape and other names, such as the first of a tuple beside ``.logits``, are
    paired in their order. What is left with one name has two shapes, and differs.
    """
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


def _compare_layers_in_order(first: ModelRun, second: ModelRun) -> Iterator[LayerComparison]:
    named: list[Cause] = []  # in earlier layers: a cause is often that of all layers
    for mine, theirs in zip(first.layers, second.layers, strict=True):
        yield LayerPair(first, second, mine, theirs).compare(named)


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
