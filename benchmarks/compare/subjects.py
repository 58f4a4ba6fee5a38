"""Reference layers of the fault bench as models and recordings of headwise."""

from __future__ import annotations

import torch

from benchmarks.faults.fault_case import Probe, Subject
from benchmarks.faults.geometry import Geometry, NormSettings, RotarySettings
from benchmarks.faults.reference_layer import STAGES, ReferenceLayer
from headwise.diagnosis.simulation.attention_model import AttentionModel
from headwise.diagnosis.simulation.settings import NormForm, RotaryForm, Settings
from headwise.diagnosis.simulation.stages import Inputs, RecordedCall
from headwise.layers.positions.rotary_scaling import (
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    Scaling,
    YarnScaling,
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
    settings = Settings(
        num_heads=g.num_heads,
        num_kv_heads=g.num_kv_heads,
        scale=g.plain_scale,
        rotary=None if g.rotary is None else rotary_form(g.rotary),
        norm=None if g.qk_norm is None else norm_form(g.qk_norm),
        softcap=g.softcap,
        slopes=stored["slopes"].double() if g.alibi else None,
        causal=g.causal,
        window=None if g.window is None else (g.window - 1, g.window - 1),
    )
    return AttentionModel(settings, {name: x.double() for name, x in weights.items()})


def rotary_form(rotary: RotarySettings) -> RotaryForm:
    """Return the rotation of a geometry."""
    return RotaryForm(
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


def norm_form(norm: NormSettings) -> NormForm:
    """Return the norm of a geometry."""
    return NormForm(
        kind=norm.kind,
        over="head" if norm.over == "head" else "width",
        place="before" if norm.place == "before rotary" else "after",
        weight_offset=norm.weight_offset,
        eps=norm.eps,
    )


def record(subject: Subject, probe: Probe) -> list[RecordedCall]:
    """Return the calls of a probe with the stages of the layer."""
    calls: list[RecordedCall] = []
    start = 0
    dtype = next(subject.parameters()).dtype
    for stages in probe.run(subject):
        length = stages["q"].shape[1] if not probe.steps else probe.steps[len(calls)]
        end = start + length
        mask = probe.mask if probe.mask is None or not probe.steps else probe.mask[..., :end]
        positions = probe.positions
        if positions is not None and probe.steps:
            positions = positions[:, start:end]
        inputs = Inputs(
            x=probe.x[:, start:end] if probe.steps else probe.x,
            source=probe.source,
            mask=mask,
            positions=positions,
        )
        recorded = {
            name: _by_head(name, x).double() for name, x in stages.items() if name in STAGES
        }
        earlier = tuple(calls) if probe.steps else ()
        calls.append(RecordedCall(inputs, recorded, dtype, earlier))
        start = end
    return calls


def _by_head(name: str, x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2) if name in SPLIT or name == "head outputs" else x


def cached_geometry(geometry: Geometry) -> bool:
    """True if keys come from the sequence itself, so that calls can share a cache."""
    return not geometry.cross
