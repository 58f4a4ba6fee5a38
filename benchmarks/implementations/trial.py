"""One class, built small with two attention implementations, and compared with itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise import compare
from headwise.errors import HeadwiseError
from headwise.function.rounding import relative_difference_norm
from headwise.identify.results import Diagnosis
from tools.huggingface_classes import classes, comparing
from tools.huggingface_classes import trial as class_trial
from tools.huggingface_classes.inputs import ERRORS

PAIRS = (("eager", "sdpa"), ("eager", "flex_attention"))
ABSENT, REFUSED_BY_MODEL = "not built", "transformers refuses"
REFUSED, FAILED = "compare refuses", "compare fails"
LONGEST = 300


@dataclass
class ImplementationRow:
    """Comparison of two implementations of a class on one input.

    Attributes:
        verdict: of compare, or the reason why there is none, which ``reason`` details.
        padding: "none", "right" or "left" for texts; "as it is" for other inputs.
        layer: the first that differs; ``stage`` is the first in it.
        largest: the largest relative difference in that layer.
        gap: the relative difference of the outputs of the two float32 models, without compare;
            ``real_gap`` leaves out positions that are padding.
    """

    model_type: str
    class_name: str
    pair: str = ""
    padding: str = ""
    verdict: str = ABSENT
    reason: str = ""
    layer: str = ""
    stage: str = ""
    outside: str = ""
    causes: list[str] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)
    layers: int = 0
    parted: int = 0
    skipped: int = 0
    of_second: bool = False
    largest: float | None = None
    gap: float | None = None
    real_gap: float | None = None

    def record(self) -> dict[str, Any]:
        return asdict(self)


def tried(model_type: str) -> list[dict[str, Any]]:
    """The rows of a model type, as records."""
    return [row.record() for row in _rows(model_type)]


def _rows(model_type: str) -> Iterator[ImplementationRow]:
    kind = classes.model_class(model_type)
    if kind is None:
        yield ImplementationRow(model_type, "", reason="no class")
        return
    row = class_trial.Row(model_type, kind.__name__)
    found = class_trial.model_and_inputs(kind, row)
    if found is None:
        yield ImplementationRow(model_type, kind.__name__, reason=row.reason)
        return
    _, inputs = found
    models = {name: _built(kind, row, name) for name in dict.fromkeys(chain(*PAIRS))}
    for pair in PAIRS:
        yield from _pair_rows(model_type, kind.__name__, pair, models, inputs)


def _pair_rows(
    model_type: str,
    class_name: str,
    pair: tuple[str, str],
    models: Mapping[str, PreTrainedModel | str],
    inputs: dict[str, Any],
) -> Iterator[ImplementationRow]:
    words = " against ".join(pair)
    first, second = (models[name] for name in pair)
    if isinstance(first, str) or isinstance(second, str):
        reason = str(first if isinstance(first, str) else second)
        yield ImplementationRow(model_type, class_name, words, "", REFUSED_BY_MODEL, reason)
        return
    second.load_state_dict(first.state_dict())
    for padding, given in _variants(inputs):
        row = ImplementationRow(model_type, class_name, words, padding)
        yield compared(row, first, second, given)


def _built(kind: type[PreTrainedModel], row: class_trial.Row, name: str) -> PreTrainedModel | str:
    """The model with this implementation, or the reason why there is none."""
    try:
        model = class_trial.built(kind, row, row.level, implementation=name)
    except ERRORS as error:
        return class_trial.said(error)
    assert model is not None, "the same class was built before"
    set_to = model.config._attn_implementation
    return model if set_to == name else f"{name} is set to {set_to}"


def _variants(inputs: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The inputs without padding, with padding on the right, and on the left."""
    mask = inputs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or bool(mask.all()):
        yield "as it is", inputs
        return
    yield "none", {name: x for name, x in inputs.items() if name != "attention_mask"}
    yield "right", inputs
    yield "left", inputs | {"attention_mask": mask.flip(1)}


def compared(
    row: ImplementationRow,
    first: PreTrainedModel,
    second: PreTrainedModel,
    inputs: dict[str, Any],
) -> ImplementationRow:
    """The row with the verdict of compare, and with what the two models give without it."""
    try:
        row.gap, row.real_gap = _gaps(first, second, inputs)
    except ERRORS as error:
        row.verdict, row.reason = REFUSED_BY_MODEL, class_trial.said(error)
        return row
    try:
        diagnosis = compare(first, second, inputs)
    except HeadwiseError as error:
        row.verdict, row.reason = REFUSED, " ".join(str(error).split())[:LONGEST]
    except ERRORS as error:
        row.verdict, row.reason = FAILED, class_trial.said(error)
    else:
        _fill(row, diagnosis)
    return row


def _gaps(
    first: PreTrainedModel, second: PreTrainedModel, inputs: dict[str, Any]
) -> tuple[float, float]:
    """The largest relative difference of an output: at all positions, and at real ones."""
    with torch.compiler.set_stance("force_eager"):  # as compare runs flex_attention
        results = [comparing.run(model, inputs) for model in (first, second)]
    gaps = []
    for where in ({}, inputs):
        mine, theirs = (comparing.outputs(result, where) for result in results)
        # Only eager can return weights.
        common = [n for n in mine if n in theirs and not n.startswith(comparing.WEIGHTS)]
        gaps.append(
            max((relative_difference_norm(mine[n], theirs[n]) for n in common), default=0.0)
        )
    return gaps[0], gaps[1]


def _fill(row: ImplementationRow, diagnosis: Diagnosis) -> None:
    comparison = diagnosis.model
    assert comparison is not None
    row.verdict, row.outside = diagnosis.verdict.value, comparison.difference_outside_attention
    row.causes, row.unexplained = comparison.cause_names, comparison.unexplained_places
    row.layers, row.parted = len(comparison.layers), len(comparison.differing_layers)
    notes = [layer.note for layer in comparison.layers if layer.note]
    row.skipped, row.reason = len(notes), notes[0] if notes else ""
    if comparison.differing_layers:
        layer = comparison.differing_layers[0]
        row.layer, row.of_second = layer.name, layer.is_of_second
        row.stage = layer.comparison.parted[0].stage
        row.largest = max(stage.size for stage in layer.comparison.parted)
