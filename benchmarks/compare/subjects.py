"""Reference layers of the fault bench as models and recordings of headwise."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.faults.fault_case import LayerStack, Probe
from benchmarks.faults.fault_case import Subject as Layer
from benchmarks.faults.geometry import NormSettings, RotarySettings
from benchmarks.faults.reference_layer import STAGES, ReferenceLayer
from headwise.diagnosis.simulation.model import AttentionModel, Inputs, RecordedCall
from headwise.diagnosis.subjects.run import LayerRun, ModelRun
from headwise.diagnosis.subjects.subject import Subject
from headwise.function.scaling import LinearScaling, Llama3Scaling, NTKScaling, Scaling, YarnScaling
from headwise.function.spec import (
    ABSENT,
    AlibiRule,
    AttentionSpec,
    NormRule,
    RotaryRule,
    Softcap,
)

SPLIT = ("q", "k", "v", "q after norm", "k after norm", "q after rotary", "k after rotary")


def model_of(layer: ReferenceLayer) -> AttentionModel:
    """Return the model of a good layer."""
    g = layer.geometry
    stored = layer.all_weights()
    weights = {}
    for role, heads in (("q", g.num_heads), ("k", g.num_kv_heads), ("v", g.num_kv_heads)):
        weights[f"w{role}"] = stored[f"w{role}"].unflatten(0, (heads, -1))
        if f"b{role}" in stored:
            weights[f"b{role}"] = stored[f"b{role}"].unflatten(0, (heads, -1))
    weights["wo"] = stored["wo"].mT.unflatten(0, (g.num_heads, -1))
    weights |= {name: stored[name] for name in ("bo", "sink") if name in stored}
    for role, heads in (("q", g.num_heads), ("k", g.num_kv_heads)):
        if f"{role}_norm" in stored:
            norm = stored[f"{role}_norm"]
            is_shared = norm.numel() == g.head_dim
            name = f"{role}_norm" if is_shared else f"{role}_norms"
            weights[name] = norm if is_shared else norm.unflatten(0, (heads, -1))
    settings = AttentionSpec(
        num_heads=g.num_heads,
        num_kv_heads=g.num_kv_heads,
        head_dim=g.head_dim,
        scale=g.plain_scale,
        rotary=ABSENT if g.rotary is None else rotary_form(g.rotary),
        qk_norm=ABSENT if g.qk_norm is None else norm_form(g.qk_norm),
        softcap=ABSENT if g.softcap is None else Softcap(g.softcap),
        score_bias=AlibiRule(slopes=tuple(stored["slopes"].tolist())) if g.alibi else ABSENT,
        causal=g.causal,
        window=ABSENT if g.window is None else (g.window - 1, g.window - 1),
    )
    return AttentionModel(settings, {name: x.double() for name, x in weights.items()})


def rotary_form(rotary: RotarySettings) -> RotaryRule:
    """Return the rotation of a geometry."""
    return RotaryRule(
        theta=rotary.theta,
        width=rotary.width,
        pairing=rotary.pairing,
        scaling=scaling_of(rotary),
        exponent_width=rotary.exponent_width,
        attention_factor=rotary.attention_factor,
    )


def scaling_of(rotary: RotarySettings) -> Scaling | None:
    """Return the scaling of a geometry's frequencies."""
    match rotary.scaling:
        case "none":
            return None
        case "linear":
            return LinearScaling(rotary.factor)
        case "ntk":
            return NTKScaling(rotary.factor)
        case "llama3":
            return Llama3Scaling(rotary.factor, 1.0, 4.0, rotary.original_length)
        case "yarn":
            return YarnScaling(rotary.factor, rotary.original_length)


def norm_form(norm: NormSettings) -> NormRule:
    """Return the norm of a geometry."""
    return NormRule(
        kind=norm.kind,
        over="head" if norm.over == "head" else "width",
        place="before" if norm.place == "before rotary" else "after",
        weight_offset=norm.weight_offset,
        eps=norm.eps,
    )


def record(subject: Layer, probe: Probe) -> list[RecordedCall]:
    """Return the calls of a probe with the stages of the layer."""
    calls: list[RecordedCall] = []
    dtype = next(subject.parameters()).dtype
    for inputs, stages in zip(inputs_of(probe).per_call, probe.run(subject), strict=True):
        recorded = {
            name: _by_head(name, x).double() for name, x in stages.items() if name in STAGES
        }
        earlier = tuple(calls) if probe.steps else ()
        calls.append(RecordedCall(inputs, recorded, dtype, earlier))
    return calls


def _by_head(name: str, x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2) if name in SPLIT or name == "head outputs" else x


class ReferenceSubject(Subject):
    """A layer of the fault bench as the subject of a comparison."""

    def __init__(self, layer: Layer) -> None:
        self.kind = "reference layer"
        self.layer = layer
        self.dtype = next(layer.parameters()).dtype

    @property
    def model(self) -> AttentionModel | None:
        """The layer as data."""
        return model_of(self.layer) if isinstance(self.layer, ReferenceLayer) else None

    def output(self, inputs: Inputs) -> torch.Tensor:
        """Return the output of a call."""
        return self.record_calls(inputs)[0].stages["output"]

    def record(self, inputs: Inputs) -> RecordedCall:
        """Return the stages of a call."""
        return self.record_calls(inputs)[0]

    def record_calls(self, inputs: Inputs) -> list[RecordedCall]:
        """Return the stages of each call."""
        dtype = self.dtype
        return record(
            self.layer,
            Probe(
                inputs.x.to(dtype),
                None if inputs.source is None else inputs.source.to(dtype),
                inputs.mask,
                inputs.positions,
                inputs.steps,
            ),
        )


def inputs_of(probe: Probe) -> Inputs:
    """Return the inputs of a probe."""
    return Inputs(probe.x, probe.source, probe.mask, probe.positions, probe.steps)


def run_of(stack: LayerStack, probe: Probe) -> ModelRun:
    """Return a run of layers in sequence, each with a residual connection."""
    x, layers = probe.x, []
    for index, layer in enumerate(stack.layers):
        [call] = record(layer, replace(probe, x=x))
        layers.append(LayerRun(f"layers.{index}", call, model_of(layer)))
        x = x + call.stages["output"].to(x.dtype)
    return ModelRun("LayerStack", layers, {"": x}, "the probe of the case")
