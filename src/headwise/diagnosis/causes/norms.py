"""Causes in norms and residuals: of queries and keys, and of the input and the output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import ClassVar, Literal

from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.causes.projections import flatten_tokens
from headwise.diagnosis.simulation.model import AttentionModel, ForcedStage, project_heads
from headwise.function.spec import NormRule

KINDS: tuple[Literal["rms", "layer", "l2"], ...] = ("rms", "layer", "l2")
OVER: tuple[Literal["head", "width"], ...] = ("head", "width")


class QKNormKindCause(Cause):
    """Queries and keys are normalised by another formula, over other channels, or not at all.

    Qwen3 and Gemma 3 take the RMS norm of each head. OLMo 2 takes it over all heads at once.
    Chameleon takes a layer norm.

    Wrong:
        q = rms_norm(q.unflatten(-1, (heads, d)))  # OLMo 2

    Right:
        q = rms_norm(q).unflatten(-1, (heads, d))

    Repair:
        Take the norm that is reported: `QKNorm()` for Qwen3, `QKNorm(over="width")` for OLMo 2.

    Confused with:
        qk-norm weight offset: if all weights of the norm are equal.
        scale: RMS norm and L2 norm differ by sqrt(head_dim), which is a factor of the scores.
    """

    name: ClassVar[str] = "qk-norm kind"
    symptom: ClassVar[str] = (
        "Attention is wrong in models with QK-norm alone, such as Qwen3, Gemma 3 and OLMo 2"
    )
    stages: ClassVar[tuple[str, ...]] = (
        "q after norm",
        "k after norm",
        "q after rotary",
        "k after rotary",
    )
    is_whole: ClassVar[bool] = True

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the other kinds over a head and over the whole width; without weights for none."""
        norm = evidence.model.settings.norm
        if norm is None:
            for kind in KINDS:
                for over in OVER:
                    model = evidence.model.with_settings(qk_norm=NormRule(kind, over, eps=1e-6))
                    parameters = {"norm": f"{kind} over the {over}, without weights"}
                    yield Variant(model, parameters, "leave out the norm of q and k")
            return
        repair = f"{norm.kind} norm over the {norm.over}"
        yield Variant(evidence.model.with_settings(qk_norm=None), {"norm": "none"}, repair)
        for kind in KINDS:
            for over in OVER:
                if (kind, over) != (norm.kind, norm.over):
                    model = evidence.model.with_settings(
                        qk_norm=replace(norm, kind=kind, over=over)
                    )
                    yield Variant(model, {"norm": f"{kind} over the {over}"}, repair)


class QKNormPlaceCause(Cause):
    """Queries and keys are normalised after the rotation in place of before it, or the reverse.

    A rotation keeps lengths. The order therefore matters only if the norm has weights that differ
    by channel, or a mean.

    Wrong:
        q = norm(rotate(q))  # Qwen3

    Right:
        q = rotate(norm(q))

    Repair:
        `QKNorm(place=...)` with the place that is reported. Hunyuan normalises after the rotation,
        most others before it.

    Confused with:
        rotary missing: at position 0 all three agree.
        qk-norm kind: RMS norm with equal weights is the same at both places.
    """

    name: ClassVar[str] = "qk-norm place"
    symptom: ClassVar[str] = (
        "QK-norm before or after RoPE: queries and keys agree without the rotation"
    )
    stages: ClassVar[tuple[str, ...]] = (
        "q after norm",
        "k after norm",
        "q after rotary",
        "k after rotary",
    )

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the other place."""
        norm = evidence.model.settings.norm
        if norm is not None:
            place: Literal["before", "after"] = "after" if norm.place == "before" else "before"
            model = evidence.model.with_settings(qk_norm=replace(norm, place=place))
            yield Variant(model, {"place": place}, f"normalise {norm.place} the rotation")


class QKNormWeightOffsetCause(Cause):
    """The weight of the norm is used as w in place of 1 + w, or the reverse.

    Gemma stores what is added to 1. A port that multiplies by the stored weight makes queries and
    keys much too small.

    Wrong:
        normed * weight

    Right:
        normed * (1 + weight)

    Repair:
        Add 1 to the weights once, in the code or in the file: `QKNorm(one_plus=True)`.

    Confused with:
        scale: if all weights of the norm are equal.
        factor: likewise, in q or in k alone.
    """

    name: ClassVar[str] = "qk-norm weight offset"
    symptom: ClassVar[str] = "Gemma's norm weights are used as w in place of 1 + w"
    stages: ClassVar[tuple[str, ...]] = (
        "q after norm",
        "k after norm",
        "q after rotary",
        "k after rotary",
    )

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the other convention."""
        norm = evidence.model.settings.norm
        if norm is not None:
            offset = 0.0 if norm.weight_offset else 1.0
            model = evidence.model.with_settings(qk_norm=replace(norm, weight_offset=offset))
            right = "1 + w" if norm.weight_offset else "w"
            yield Variant(model, {"offset": offset}, f"multiply by {right}, w the stored weight")


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


class ResidualInsideCause(Cause):
    """One of the two adds its input to its output.

    BLOOM, and many teaching examples, add the residual inside the attention module.

    Repair:
        Compare `a(x) - x`, or leave the residual to the block.

    Confused with:
        norm inside: modules with a residual often normalise as well.
    """

    name: ClassVar[str] = "residual inside"
    symptom: ClassVar[str] = (
        "The attention output is off by exactly its input: a residual is inside one module"
    )
    stages: ClassVar[tuple[str, ...]] = ("output",)

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the output plus the input."""
        if evidence.model.weights["wo"].shape[2] == evidence.model.weights["wq"].shape[2]:
            model = evidence.model.with_stage_function("output", _add_residual)
            yield Variant(model, {}, "compare without the residual: a(x) - x")


def _add_residual(forced: ForcedStage) -> Tensor:
    return forced.usual_result() + forced.call.inputs.x
