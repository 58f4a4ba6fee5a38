"""Layers of stored weights, each run on the input of a running model's layer."""

from __future__ import annotations

from pathlib import Path

from headwise.checkpoints.attention_loading import load_attention
from headwise.diagnosis.subjects.model_run_result import LayerRun, ModelRun
from headwise.diagnosis.subjects.native_subject import NativeSubject


def run_stored_layers(path: Path, model: ModelRun) -> ModelRun:
    """Load as many layers as a model has, and run each on the input of the model's layer.

    Args:
        path: the weights, with the settings of their model beside them or in their metadata.
        model: the run of the model.

    Raises:
        CheckpointError, OptionError: a layer cannot be loaded.
    """
    layers = []
    for number, other in enumerate(model.layers):
        subject = NativeSubject(load_attention(path, layer=number))
        call = subject.record(other.call.inputs)
        run = LayerRun(f"layer {number} of {path.name}", call, subject.model, stored=subject.dtype)
        layers.append(run)
    return ModelRun(path.name, layers, None, model.inputs)
