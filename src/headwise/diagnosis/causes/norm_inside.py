"""One of the two normalises its input, or its output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import ClassVar

from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.causes.collect_projection_tokens import flatten_tokens
from headwise.diagnosis.simulation.attention_model import AttentionModel, ForcedStage, project_heads

Norm = Callable[[Tensor], Tensor]
LEAST_TOKENS = 8  # of which two decide the weight and the bias of a channel


class NormInsideCause(Cause):
    """One of the two normalises its input, or its output.

    Many modules hold the layer norm of the block: before attention (pre-norm), or after it and the
    residual (post-norm). The weights of a norm of the output are read off the recorded outputs; a
    norm of the input is named without weights alone.

    Repair:
        Compare the two without their norms, or put the norm before both.

    Confused with:
        qk-norm kind: on queries and keys alone.
        residual inside: a module that has the norm often has the residual too.
    """

    name: ClassVar[str] = "norm inside"
    symptom: ClassVar[str] = (
        "Attention blocks agree only after a layer norm: one of them normalises inside"
    )
    stages: ClassVar[tuple[str, ...]] = ("q", "k", "v", "output")

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return layer norm and RMS norm of the input, and of the output with weights or without.

        A norm of the output may follow a residual.
        """
        for kind in ("layer", "rms"):
            for eps in (1e-5, 1e-6, 1e-12, 1e-8):
                norm = partial(_normalise_last_axis, kind, eps)
                model = evidence.model
                for role in "qkv":
                    model = model.with_stage_function(role, partial(_project_normed_input, norm))
                yield Variant(
                    model, {"norm": f"{kind} of the input"}, "normalise both inputs or neither"
                )
                yield from _variants_of_output_norm(evidence, kind, norm)


def _variants_of_output_norm(evidence: Evidence, kind: str, norm: Norm) -> Iterator[Variant]:
    repair = "normalise both outputs or neither"
    for has_residual in (False, True):
        if has_residual and evidence.model.weights["wo"].shape[2] != _input_width(evidence):
            continue
        words = f"{kind} of the output{' and the residual' if has_residual else ''}"
        model = evidence.model.with_stage_function(
            "output", partial(_normalise_output, norm, has_residual)
        )
        yield Variant(model, {"norm": words}, repair)
        if (weights := _fit_norm_weights(evidence, model)) is not None:
            weighted = model.with_stage_function(
                "output", partial(_scale_and_shift_output, *weights)
            )
            yield Variant(weighted, {"norm": words, "weights": "of its own"}, repair)


def _input_width(evidence: Evidence) -> int:
    return evidence.calls[0].inputs.x.shape[2]


def _fit_norm_weights(evidence: Evidence, model: AttentionModel) -> tuple[Tensor, Tensor] | None:
    """Return the weight and the bias of each channel that make the recorded outputs nearest."""
    calls = [call for call in evidence.calls if "output" in call.stages]
    recorded = flatten_tokens(call.stages["output"] for call in calls)
    predicted = flatten_tokens(model.predict_stage("output", call) for call in calls)
    if recorded.shape != predicted.shape or len(recorded) < LEAST_TOKENS:
        return None
    if not recorded.isfinite().all():
        return None
    x, y = predicted - predicted.mean(0), recorded - recorded.mean(0)
    weight = (x * y).sum(0) / x.square().sum(0)
    return weight, recorded.mean(0) - weight * predicted.mean(0)


def _normalise_last_axis(kind: str, eps: float, x: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def _project_normed_input(norm: Norm, forced: ForcedStage) -> Tensor:
    inputs = forced.call.inputs
    source = None if inputs.source is None else norm(inputs.source.double())
    normed = replace(inputs, x=norm(inputs.x.double()), source=source)
    return project_heads(replace(forced, call=replace(forced.call, inputs=normed)))


def _normalise_output(norm: Norm, has_residual: bool, forced: ForcedStage) -> Tensor:
    return norm(
        forced.usual_result() + forced.call.inputs.x if has_residual else forced.usual_result()
    )


def _scale_and_shift_output(weight: Tensor, bias: Tensor, forced: ForcedStage) -> Tensor:
    return forced.usual_result() * weight + bias
